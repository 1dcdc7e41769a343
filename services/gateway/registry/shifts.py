"""Whose shift it is on devices that trainer and rollouts share in turns, and when they change hands. Pure.

A shift has a number that grows by one whenever the devices change hands: odd ones are the trainer's, even ones the
rollouts'. The owner of the shift may load its weights once all others have reported, under this number, that they have
released theirs; reports of an earlier shift are ignored. A service that is gone holds nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flotilla.shared.schemas.service import DeviceReport, ServiceKind

FIRST_SHIFT = 1
SHARERS = (ServiceKind.TRAINER, ServiceKind.ROLLOUT)
PATIENCE_SECONDS = 60.0
"""How long a trainer that could train waits for rollouts on which its groups depend."""

Reports = Mapping[str, DeviceReport | None]
"""By service id; None of one that has not said anything yet."""


@dataclass(frozen=True, slots=True)
class Need:
    """What speaks for a change.

    Attributes:
        rollouts_work: there is something to sample, or an engine has never had weights.
        is_pinned: an evaluation is under way or due: its version is served until it ends.
        is_publishing: a version is on its way.
        waited_seconds: how long the trainer has wanted the devices in this shift.
        patience_seconds: how long it waits for rollouts that still have work; then they hand that over.
    """

    rollouts_work: bool
    is_pinned: bool = False
    is_publishing: bool = False
    waited_seconds: float = 0.0
    patience_seconds: float = PATIENCE_SECONDS


def holder_of(shift: int) -> ServiceKind:
    """Return whose shift it is."""
    return ServiceKind.TRAINER if shift % 2 else ServiceKind.ROLLOUT


def is_clear(shift: int, others: Iterable[DeviceReport | None]) -> bool:
    """Whether all others have released the devices for this shift."""
    return all(each is not None and each.shift == shift and not each.is_held for each in others)


def next_shift(shift: int, trainer: Reports, rollouts: Reports, need: Need) -> int:
    """Find the shift that should be: this one, or the next."""
    known = max([shift, *(each.shift for each in (*trainer.values(), *rollouts.values()) if each is not None)])
    if known > shift:
        # The database came back older than the services: what they follow continues.
        return known
    is_wanted = wants(shift, trainer.values())
    if holder_of(shift) is ServiceKind.TRAINER:
        is_needed = is_wanted is None or is_wanted or need.is_publishing
        has_work = need.rollouts_work or need.is_pinned
        return shift if is_needed or not has_work else shift + 1
    if not is_wanted or need.is_pinned:
        return shift
    return shift + 1 if not need.rollouts_work or need.waited_seconds >= need.patience_seconds else shift


def wants(shift: int, trainer: Iterable[DeviceReport | None]) -> bool | None:
    """Whether the trainer needs the devices; None without a report in this shift. A departed service needs nothing."""
    told = list(trainer)
    if any(each is None or each.shift != shift for each in told):
        return None
    return any(each is not None and each.is_wanted for each in told)


def who_holds(shift: int, trainer: Reports, rollouts: Reports) -> Sequence[str]:
    """List the services that the holder of the shift waits for."""
    others = rollouts if holder_of(shift) is ServiceKind.TRAINER else trainer
    return sorted(name for name, each in others.items() if not is_clear(shift, [each]))
