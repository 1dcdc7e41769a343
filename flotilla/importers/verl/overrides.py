"""verl's values in the place of those of a model's config.json."""

from typing import Any

from flotilla.importers.source import Source
from flotilla.importers.verl.actor import MODEL
from flotilla.shared.config.sections.model import FIXED

Fields = dict[str, Any]

TREE = f"{MODEL}.override_config"
OF_MEGATRON = "model_config."
"""Below it stand the keys where Megatron trains."""


def overrides(source: Source) -> Fields:
    """Make the values; of usual dropout the table says what becomes."""
    found: Fields = {}
    for spelling, value in source.trees.get(TREE, {}).items():
        if spelling == TREE:
            _section(source, spelling, value)
            continue
        key = spelling.removeprefix(f"{TREE}.").removeprefix(OF_MEGATRON)
        first, _, rest = key.partition(".")
        if (instead := FIXED.get(first.lstrip("_"))) is not None:
            source.refuse_written(spelling, instead)
        elif rest:
            _set(found.setdefault(first, {}), rest, value)
        elif not (key == OF_MEGATRON.rstrip(".") and not value):
            found[first] = value
    return {"model.overrides": found} if found else {}


def _section(source: Source, spelling: str, value: Any) -> None:
    if value:
        source.refuse_written(spelling, "must be a section with keys of the model's config.json")


def _set(section: Fields, name: str, value: Any) -> None:
    first, _, rest = name.partition(".")
    if rest:
        _set(section.setdefault(first, {}), rest, value)
    else:
        section[first] = value
