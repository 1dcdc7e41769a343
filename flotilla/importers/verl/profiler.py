"""Which steps verl's profiler records, and on which ranks; ours writes torch's traces, whatever tool is named."""

from typing import Any

from flotilla.importers.datasets import Fields
from flotilla.importers.parameter import Parameter, translated
from flotilla.importers.source import Source
from flotilla.importers.values import flag, numbers, wrong
from flotilla.importers.verl.actor import ACTOR, ON_FOUR_GPUS

STEPS = "trainer.profile_steps"
ALL_RANKS, RANKS = f"{ACTOR}.profiler.all_ranks", f"{ACTOR}.profiler.ranks"


def whole_numbers(name: str, value: Any) -> list[int] | None:
    """Read a list of whole numbers from 0."""
    found = numbers(name, value)
    if found is None:
        return None
    if any(each < 0 or each != int(each) for each in found):
        raise wrong(name, value, "a list of whole numbers")
    return [int(each) for each in found]


ROWS: tuple[Parameter, ...] = (
    translated(STEPS, "tracking.profiler.steps", whole_numbers, "Chrome traces of torch's profiler, a file for each "
               "step and rank; of engines tracking.profiler.engine_versions names the versions", example=[2, 3],
               default=None, aliases=("global_profiler.steps",)),
    translated(ALL_RANKS, "tracking.profiler.ranks", flag, "true: all ranks of the trainer", example=True,
               default=False, context={STEPS: [2]}),
    translated(RANKS, "tracking.profiler.ranks", whole_numbers, "ranks of the trainer", example=[1], default=None,
               context={STEPS: [2], **ON_FOUR_GPUS}),
)  # fmt: skip


def profiler(source: Source) -> Fields:
    """Make the section, where steps are named."""
    steps = source.value(STEPS) if source.has(STEPS) else None
    if not steps:
        return {}
    fields: Fields = {"tracking.profiler.steps": [step for step in steps if step > 0]}
    if source.has(ALL_RANKS) and source.value(ALL_RANKS):
        fields["tracking.profiler.ranks"] = None
    elif source.has(RANKS) and (ranks := source.value(RANKS)):
        fields["tracking.profiler.ranks"] = ranks
    return fields
