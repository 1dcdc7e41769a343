"""Specs of rows: the dotted changes of a row's values in one document."""

from collections.abc import Mapping
from typing import Any

from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.spec import ExperimentSpec
from tests.pairs.covering import Row
from tests.pairs.table import Changes, Options

BASE: Changes = {
    "name": "pairs",
    "model.path": "/nowhere",
    "data.path": "unused.jsonl",
    "optimisation.steps": 3,
    "optimisation.groups_per_mini_batch": 2,
    "optimisation.learning_rate": 1e-2,
    "asynchrony.staleness_threshold": 0,
}


def changes_of(row: Row, options: Options) -> Changes:
    """Join the changes of a row's values."""
    return {key: value for name, chosen in row.items() for key, value in options[name][chosen].items()}


def document_of(*changes: Changes) -> dict[str, Any]:
    """Make a document of dotted keys; later ones count."""
    document: dict[str, Any] = {}
    for path, value in {key: value for each in changes for key, value in each.items()}.items():
        *sections, key = path.split(".")
        at = document
        for section in sections:
            at = at.setdefault(section, {})
        at[key] = value
    return document


def spec_of(row: Row, options: Options, places: Mapping[str, str], **changes: Any) -> ExperimentSpec:
    """Make the spec of a row.

    Args:
        places: paths, by what stands for them in the table.
        changes: sections with changed keys.
    """
    dotted = {f"{section}.{key}": value for section, values in changes.items() for key, value in values.items()}
    named = {**BASE, **changes_of(row, options), **dotted}
    return validate_spec(
        document_of(
            {key: places.get(value, value) if isinstance(value, str) else value for key, value in named.items()}
        )
    )
