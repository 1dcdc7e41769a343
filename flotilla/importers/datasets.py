"""Where rows are: from the paths and names that other systems take to the fields of our spec."""

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Final

from flotilla.importers.spelling import experiment_name
from flotilla.shared.config.sections.data import is_data_file, is_url

Fields = dict[str, Any]
Place = Mapping[str, Any]
"""Fields of one source: ``path``, ``hub`` or ``custom``, and what belongs to it."""

HUB: Final = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
FILES: Final = "files whose names end in .jsonl, .ndjson, .json, .csv, .parquet or .arrow, local or URLs"


def training(places: Sequence[Place]) -> Fields:
    """Make the fields of training rows; one plain path is ``data.path``."""
    if len(places) == 1 and set(places[0]) == {"path"}:
        return {"data.path": places[0]["path"]}
    return {"data.sources": [dict(place) for place in places]}


def held_out(places: Sequence[Place]) -> Fields:
    """Make the fields of held-out rows; several sets are named after their files, of like ones with folders."""
    if len(places) == 1 and set(places[0]) <= {"path", "max_rows"}:
        return {f"evaluation.{name}": value for name, value in places[0].items()}
    names: list[str] = []
    plain = [_name_of(place) for place in places]
    for place, name in zip(places, plain, strict=True):
        names.append(_unused(_name_of(place, with_folder=plain.count(name) > 1), names))
    return {"evaluation.sets": [{"name": name, **place} for name, place in zip(names, places, strict=True)]}


def file_or_hub(written: str) -> Fields:
    """Read a dataset's name as OpenRLHF does: a file, a folder, or a hub name with perhaps ``@folder``.

    A relative folder is known by its beginning, ``./``, since ``owner/name`` is a name of the hub.
    """
    name, _, folder = written.partition("@")
    if is_data_file(written) or is_url(written) or not HUB.match(name):
        return {"path": written}
    return {"hub": name, **({"subset": folder} if folder else {})}


def takes_split(place: Place) -> bool:
    """Whether a place has splits: what is no file and no class has."""
    return "hub" in place or ("path" in place and not is_data_file(place["path"]))


def _name_of(place: Place, *, with_folder: bool = False) -> str:
    written = place.get("path") or place.get("hub") or place["custom"].partition(":")[0]
    path = PurePosixPath(written.replace("*", ""))
    return experiment_name(f"{path.parent.name}-{path.stem}" if with_folder else path.stem)[:56]


def _unused(name: str, taken: Sequence[str]) -> str:
    number = 1
    while (candidate := name if number == 1 else f"{name}-{number}") in taken:
        number += 1
    return candidate
