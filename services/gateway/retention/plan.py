"""What expires by age and size, and what stays because it is referred to. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flotilla.services.gateway.retention.references import Reference
from flotilla.shared.schemas.retention import Part, Retention

DAY_SECONDS = 86_400.0
PARTS = (Part.CHECKPOINTS, Part.SAMPLES, Part.LOGS)


@dataclass(frozen=True, slots=True)
class Left:
    """What a finished experiment left.

    Attributes:
        ended_at: seconds since the epoch.
        sizes: bytes that each part frees; a part that is not there is not in it.
    """

    experiment_id: str
    ended_at: float
    sizes: Mapping[Part, int]

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.sizes.values())


@dataclass(frozen=True, slots=True)
class Decision:
    """A part that is deleted, or stays although its time is over."""

    left: Left
    part: Part
    why: str

    @property
    def num_bytes(self) -> int:
        """Bytes that it frees."""
        return self.left.total if self.part is Part.RUN else self.left.sizes.get(self.part, 0)


@dataclass(frozen=True, slots=True)
class Plan:
    """What goes, the experiment that ended last first, so that forks go before what they began from; and what stays."""

    removed: Sequence[Decision]
    kept: Sequence[Decision]


def why_needed(experiment_id: str, part: Part, references: Iterable[Reference], gone: Iterable[str] = ()) -> str | None:
    """Name the user of a part of an experiment; None: there is none.

    Args:
        experiment_id: whose part it is.
        part: that would go.
        references: between experiments.
        gone: experiments that go themselves.
    """
    gone = set(gone)
    needing = (each for each in references if each.to == experiment_id and each.by not in gone and each.protects(part))
    found = next(needing, None)
    return None if found is None else found.words


def plan(left: Sequence[Left], references: Sequence[Reference], retention: Retention, now: float) -> Plan:
    """Decide what goes.

    Args:
        left: by finished experiments; others are not considered.
        references: between all experiments.
        retention: how long what is kept.
        now: seconds since the epoch.
    """
    newest_first = sorted(left, key=lambda each: (-each.ended_at, each.experiment_id))
    runs, removed, kept = _runs(newest_first, references, retention, now)
    for each in newest_first:
        if each.experiment_id in runs:
            continue
        for part in PARTS:
            days = retention.days_of(part)
            if part in each.sizes and days is not None and _is_over(each, days, now):
                needed = why_needed(each.experiment_id, part, references, runs)
                why = f"it ended {_age(each, now)} ago, {part} are kept for {days:g}"
                (removed if needed is None else kept).append(Decision(each, part, needed or why))
    if retention.max_bytes is not None:
        _by_size(newest_first, references, retention.max_bytes, removed, kept)
    order = {each.experiment_id: number for number, each in enumerate(newest_first)}
    return Plan(sorted(removed, key=lambda decision: order[decision.left.experiment_id]), kept)


def _runs(
    newest_first: Sequence[Left], references: Sequence[Reference], retention: Retention, now: float
) -> tuple[set[str], list[Decision], list[Decision]]:
    """Decide which runs go as a whole: none that one which stays refers to."""
    days = retention.run_days
    over = [] if days is None else [each for each in newest_first if _is_over(each, days, now)]
    runs = {each.experiment_id for each in over}
    needed: dict[str, str] = {}
    while found := {name: why for name in runs if (why := why_needed(name, Part.RUN, references, runs)) is not None}:
        # What began from one that stays now may have let others go: looked at again.
        needed |= found
        runs -= found.keys()
    why = "it ended {} ago, runs are kept for " + f"{days:g}" if days is not None else ""
    removed = [Decision(each, Part.RUN, why.format(_age(each, now))) for each in over if each.experiment_id in runs]
    kept = [Decision(each, Part.RUN, needed[each.experiment_id]) for each in over if each.experiment_id in needed]
    return runs, removed, kept


def _by_size(
    newest_first: Sequence[Left],
    references: Sequence[Reference],
    max_bytes: int,
    removed: list[Decision],
    kept: list[Decision],
) -> None:
    """Let files go until the rest is small enough: those of the experiment that ended first before all others."""
    runs = {each.left.experiment_id for each in removed if each.part is Part.RUN}
    decided = {(each.left.experiment_id, each.part) for each in (*removed, *kept)}
    total = sum(each.total for each in newest_first) - sum(each.num_bytes for each in removed)
    for each in reversed(newest_first):
        for part in PARTS:
            if total <= max_bytes:
                return
            if each.experiment_id in runs or not each.sizes.get(part) or (each.experiment_id, part) in decided:
                continue
            needed = why_needed(each.experiment_id, part, references, runs)
            if needed is not None:
                kept.append(Decision(each, part, needed))
                continue
            why = f"finished experiments would keep {total} bytes, and may keep {max_bytes}"
            removed.append(Decision(each, part, why))
            total -= each.sizes[part]


def _is_over(left: Left, days: float, now: float) -> bool:
    return now - left.ended_at >= days * DAY_SECONDS


def _age(left: Left, now: float) -> str:
    return f"{max(0.0, now - left.ended_at) / DAY_SECONDS:.1f} days"
