"""verl's ``trainer.val_only``: the held-out problems are answered and graded once, and nothing is trained."""

from collections.abc import Mapping
from typing import Any, Final

from flotilla.importers.source import Source

NAME: Final = "trainer.val_only"
KEPT: Final = ("name", "seed", "model", "data", "rollout", "reward", "samples", "tracking", "evaluation")
"""Sections that say how problems are answered and graded, and how that is kept."""
OF_TRAINING: Final = (
    "model.lora", "data.path", "data.sources", "data.max_rows", "data.shuffle", "reward.group_filter",
    "evaluation.every_versions",
)  # fmt: skip
"""Of these what training alone reads."""


def only_validated(source: Source, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Leave of a spec what an evaluation reads, where the run ends after its validation; else return all of it."""
    if not source.value(NAME):
        return dict(fields)
    if not any(field.startswith("evaluation.") for field in fields):
        source.refuse(NAME, "there are no held-out problems to answer: give data.val_files")
        return dict(fields)
    left = {field: value for field, value in fields.items() if _is_read(field)}
    source.missing[:] = [each for each in source.missing if _is_read(each.partition(":")[0])]
    for name in [*source.read]:
        targets = source.system.parameters[name].targets
        if targets and name != NAME and not any(_is_read(target) for target in targets):
            source.read.discard(name)
    return left | {"job.kind": "evaluation"}


def _is_read(field: str) -> bool:
    is_training = any(field == each or field.startswith(f"{each}.") for each in OF_TRAINING)
    return field.partition(".")[0] in KEPT and not is_training
