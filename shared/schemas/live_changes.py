"""Changes of a spec while its experiment runs: what was changed, by whom, and from which policy version it holds."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from flotilla.shared.schemas.later_values import shown
from flotilla.shared.schemas.wire import TolerantWire, Wire


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

    def holds_at(self, version: int) -> bool:
        """Whether it holds for a policy version."""
        return self.version is not None and self.version <= version


class AdoptRequest(Wire):
    """The version whose first step the trainer is about to begin: what waits for it holds from there on."""

    version: int = Field(ge=0)
    step: int = Field(ge=0)
    """Steps done."""


class AdoptAnswer(TolerantWire):
    """All changes of the experiment, oldest first."""

    changes: tuple[LiveChange, ...]


def held_at(changes: Sequence[LiveChange], version: int) -> tuple[LiveChange, ...]:
    """Choose those that hold for a policy version."""
    return tuple(each for each in changes if each.holds_at(version))


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
        if found[place].version is None and each.version is not None:
            found[place] = found[place].model_copy(update={"version": each.version, "step": each.step})
    return tuple(found)
