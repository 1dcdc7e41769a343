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
            put(found, key, value)
        elif not (key == OF_MEGATRON.rstrip(".") and not value):
            found[first] = value
    return {"model.overrides": found} if found else {}


def _section(source: Source, spelling: str, value: Any) -> None:
    if value:
        source.refuse_written(spelling, "must be a section with keys of the model's config.json")


def put(section: Fields, name: str, value: Any) -> None:
    """Set a value at a dotted name, in the place of what is no section on the way."""
    first, _, rest = name.partition(".")
    if not rest:
        section[first] = value
        return
    if not isinstance(section.get(first), dict):
        section[first] = {}
    put(section[first], rest, value)
