"""Which steps can be computed again, and from where: pure.

A step needs its own samples, whole, and weights before it: those of a checkpoint, or the model that training began
with. The samples of all steps in between are trained again first, so none may be missing, and each must continue the
one before it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from flotilla.shared.checkpoints.lineage import ROOT
from flotilla.shared.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What is known of the samples of a step without reading them.

    Attributes:
        parent, lineage: names of what was trained before it, and with it.
        is_whole: whether all its groups are kept.
    """

    parent: str
    lineage: str
    is_whole: bool


def start_of(step: int, records: Mapping[int, StepRecord], starts: Mapping[int, str]) -> int:
    """Find the newest start from which a step can be computed again.

    Args:
        step: to be computed.
        records: samples by step.
        starts: lineage by step of every checkpoint there is; 0 is the model that training began with.

    Raises:
        InvalidRequest: there is none; the detail says why, and which steps there are.
    """
    if step not in records:
        raise InvalidRequest(f"step {step} has no samples: {_possible(records, starts)}", step=step)
    missing = ""
    for start in sorted((each for each in starts if each < step), reverse=True):
        why = _why_not(start, step, records, starts[start])
        if why is None:
            return start
        missing = missing or why
    missing = missing or "there is no checkpoint before it"
    raise InvalidRequest(
        f"step {step} cannot be computed again: {missing}. {_possible(records, starts).capitalize()}", step=step
    )


def _why_not(start: int, step: int, records: Mapping[int, StepRecord], lineage: str) -> str | None:
    for number in range(start + 1, step + 1):
        record = records.get(number)
        if record is None:
            return f"step {number} after the checkpoint of step {start} has no samples"
        if not record.is_whole:
            return f"of step {number} only some groups are kept (samples.groups_per_step)"
        if record.parent != lineage:
            return f"the samples of step {number} continue other weights than those of step {number - 1}"
        lineage = record.lineage
    return None


def _possible(records: Mapping[int, StepRecord], starts: Mapping[int, str]) -> str:
    found = [
        step
        for step in sorted(records)
        if any(start < step and _why_not(start, step, records, starts[start]) is None for start in _near(step, starts))
    ]
    if not found:
        return "no step can be: a step needs its samples, a checkpoint before it and all samples in between"
    runs: list[list[int]] = []
    for step in found:
        if runs and runs[-1][1] == step - 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    return f"steps that can be: {', '.join(str(a) if a == b else f'{a} to {b}' for a, b in runs)}"


def _near(step: int, starts: Mapping[int, str]) -> list[int]:
    """The newest starts before a step: one that works further back works through them, too, where they are whole."""
    return sorted((start for start in starts if start < step), reverse=True)[:2]


ROOT_LINEAGE = ROOT
"""Of the model that training began with."""
