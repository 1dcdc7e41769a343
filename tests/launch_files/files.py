"""Launch files in a folder: lists with what really happened (``verl.json``), or plain scripts and YAML."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flotilla.importers.systems import HINTS, SCRIPTS, SYSTEMS

YAML = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class LaunchFile:
    """One launch file, with the truth about it where that is known.

    Attributes:
        id: system, version and path; the path in its folder where it is a plain file.
        system: whose it is.
        name: of the file; its suffix tells scripts from YAML.
        text: what it holds.
        environment: variables that were set when it ran.
        program: what a real shell started; None where that is not known.
        arguments: that the program was given.
        beside: texts of the files that its ``defaults`` name, by their place.
        resolved: dotted names and values, as Hydra resolved them; None where that is not known.
        path: where a plain file lies, with its neighbours; None for one of a list.
    """

    id: str
    system: str
    name: str
    text: str
    environment: Mapping[str, str] = field(default_factory=dict)
    program: str | None = None
    arguments: tuple[str, ...] = ()
    beside: Mapping[str, str] = field(default_factory=dict)
    resolved: Mapping[str, Any] | None = None
    path: Path | None = None


def launch_files(folder: Path, system: str | None = None) -> list[LaunchFile]:
    """Find the launch files of a folder, of one system or of all.

    Raises:
        ValueError: there is none.
    """
    listed = [each for path in sorted(folder.glob("*.json")) for each in _of_list(path)]
    plain = sorted(path for path in folder.rglob("*") if path.suffix in (*SCRIPTS, *YAML) and path.is_file())
    found = [*listed, *(each for path in plain if (each := _plain(path, folder, system)) is not None)]
    chosen = [each for each in found if system in {None, each.system}]
    if not chosen:
        raise ValueError(f"{folder} holds no launch file{f' of {system}' if system else ''}")
    return chosen


def _of_list(path: Path) -> Iterator[LaunchFile]:
    document = json.loads(path.read_text(encoding="utf-8"))
    for item in document if isinstance(document, list) else []:
        if not isinstance(item, dict) or not {"id", "text"} <= set(item):
            continue
        system = next((each for each in SYSTEMS if path.stem.startswith(each) or item["id"].startswith(each)), None)
        if system is not None:
            yield LaunchFile(
                id=item["id"],
                system=system,
                name=_name(item),
                text=item["text"],
                environment=item.get("environment") or {},
                program=item.get("program"),
                arguments=tuple(item.get("arguments") or ()),
                beside=item.get("beside") or {},
                resolved=item.get("resolved"),
            )


def _name(item: Mapping[str, Any]) -> str:
    """Name the file; a list may leave the suffix out."""
    name = str(item["id"]).rpartition("/")[2]
    is_script = "arguments" in item or item["text"].startswith("#!")
    return name if name.endswith((*SCRIPTS, *YAML)) else f"{name}.sh" if is_script else f"{name}.yaml"


def _plain(path: Path, folder: Path, system: str | None) -> LaunchFile | None:
    text = path.read_text(encoding="utf-8", errors="replace")
    written = path.relative_to(folder)
    whose = system or next((name for name in SYSTEMS if name in str(written).lower()), None)
    whose = whose or next((name for name, hints in HINTS.items() if any(hint in text for hint in hints)), None)
    return None if whose is None else LaunchFile(str(written), whose, path.name, text, path=path)
