"""Changes of a spec while its experiment runs: what was changed, by whom, and from which policy version it holds."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, Final

from pydantic import Field

from flotilla.shared.schemas.later_values import shown
from flotilla.shared.schemas.wire import TolerantWire, Wire

SOURCES: Final = "data.sources."
"""Begins the path of each key of a source."""
ROWS: Final = "data."
"""Begins the path of each key that decides which row a group answers."""


class Effect(StrEnum):
    """Where a change takes effect."""

    GROUP = "group"
    """With each group that is issued from then on, which carries it through sampling, grading and training."""
    TRAINER = "trainer"
    """From the first step that trains a version."""
    GATEWAY = "gateway"
    """At once, in the gateway alone."""


class ChangedKey(TolerantWire):
    """A key, by its path in the spec, and its values."""

    path: str
    before: Any = None
    after: Any = None


class LiveChange(TolerantWire):
    """Keys of one effect that were changed together."""

    id: str
    at: str
    actor: str
    """Name of the token that was shown; ``rule NAME`` where a rule of the spec did it."""
    effect: Annotated[Effect, shown(Effect)]
    keys: tuple[ChangedKey, ...] = Field(min_length=1)
    version: int | None = None
    """The policy version from which on it holds: of the groups issued, or of the steps trained. Null until the trainer
    has come to a version that it has not begun to train."""
    step: int | None = None
    """Steps done when it began to hold, as far as the gateway knew."""
    group_id: int | None = None
    """Of a change of the weights of sources or pools: the first group whose row was chosen by them. Null until the next
    group is issued."""

    @property
    def is_settled(self) -> bool:
        """Whether version and group are known from which it holds."""
        return self.version is not None and (self.group_id is not None or not self.reweighs_rows)

    @property
    def reweighs_rows(self) -> bool:
        """Whether it changes from which source, or which pool of a curriculum, the rows of the next groups come."""
        return any(key.path.startswith(ROWS) for key in self.keys)

    def holds_at(self, version: int) -> bool:
        """Whether it holds for a policy version."""
        return self.version is not None and self.version <= version


class WeightsFrom(TolerantWire):
    """Weights of the sources of rows, from a group on."""

    group_id: int
    weights: tuple[float, ...]
    """One per source; only their ratios count."""


class CurriculumState(TolerantWire):
    """A snapshot of rows: by it, the seed and the weights the rows of later groups are drawn."""

    group_id: int
    """First group that is drawn by it."""
    rows: tuple[tuple[int, int, float | None], ...]
    """Rows that were asked: number, times, and mean reward; null while no group was graded."""
    seen: dict[str, int]
    """Newest outcome that was taken of each session of a reward service."""
    drawn: tuple[tuple[int, int], ...] = ()
    """Rows of groups before it, by group: what is issued again answers the same row."""

    def issued_again_from(self, group_id: int) -> "CurriculumState":
        """Leave out the rows of earlier groups, which are not issued again."""
        return self.model_copy(update={"drawn": tuple(pair for pair in self.drawn if pair[0] >= group_id)})


class AdoptRequest(Wire):
    """The version whose first step the trainer is about to begin: what waits for it holds from there on."""

    version: int = Field(ge=0)
    step: int = Field(ge=0)
    """Steps done."""


class AdoptAnswer(TolerantWire):
    """All changes of the experiment, oldest first."""

    curriculum: CurriculumState | None = None
    """What is known of its rows, for checkpoints; null without a curriculum."""

    changes: tuple[LiveChange, ...]


def held_at(changes: Sequence[LiveChange], version: int) -> tuple[LiveChange, ...]:
    """Choose those that hold for a policy version."""
    return tuple(each for each in changes if each.holds_at(version))


def settled(known: LiveChange, other: LiveChange) -> LiveChange:
    """Complete an account of a change by another one, where it lacks from when on the change holds."""
    if known.version is None and other.version is not None:
        known = known.model_copy(update={"version": other.version, "step": other.step})
    if known.group_id is None and other.group_id is not None:
        known = known.model_copy(update={"group_id": other.group_id})
    return known


def merged(known: Sequence[LiveChange], others: Sequence[LiveChange]) -> tuple[LiveChange, ...]:
    """Put two accounts of the same changes together, by their ids.

    The known ones stay as they are and in their order; one that waits takes the version that the others say. One that
    is missing comes right after the one that it follows in the others' account: clocks are not compared.
    """
    found = list(known)
    place = -1
    for each in others:
        there = next((index for index, one in enumerate(found) if one.id == each.id), None)
        if there is None:
            place += 1
            found.insert(place, each)
            continue
        place = there
        found[place] = settled(found[place], each)
    return tuple(found)
