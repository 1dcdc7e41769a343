"""Which samples are wanted, and in which order. Imports no library: a command that reads files starts with it."""

from dataclasses import dataclass
from enum import StrEnum

from flotilla.shared.errors import InvalidRequest
from flotilla.shared.schemas.sample_kinds import SampleKind

MAX_NUMBER = 2**63 - 1


class SampleOrder(StrEnum):
    """Which samples come first."""

    NEWEST = "newest"
    """By when they were written, newest first; in the order of their file."""
    BEST = "best"
    """By reward, greatest first; those without one are left out."""
    WORST = "worst"
    """By reward, smallest first; those without one are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleQuery:
    """Which samples are wanted; what is None is not asked for.

    Attributes:
        step: of this trained step, or of the evaluations of the version that it made.
        kinds: any of these; all if empty.
        row: of this row of the dataset: the problem.
        group: of the group of this id.
        status: how grading ended, as ``GradeStatus`` has it.
        is_failure: only samples of failed groups, and those whose grading failed.
        min_reward, max_reward: finite bounds, both included.
        order: which come first.
    """

    step: int | None = None
    kinds: tuple[SampleKind, ...] = ()
    row: int | None = None
    group: int | None = None
    status: str | None = None
    is_failure: bool = False
    min_reward: float | None = None
    max_reward: float | None = None
    order: SampleOrder = SampleOrder.NEWEST

    def __post_init__(self) -> None:
        """Check that the index can be asked.

        Raises:
            InvalidRequest: a number has more than 63 bits.
        """
        for name in ("step", "row", "group"):
            value = getattr(self, name)
            if value is not None and not -MAX_NUMBER <= value <= MAX_NUMBER:
                raise InvalidRequest(f"{name}: at most {MAX_NUMBER} is allowed")
