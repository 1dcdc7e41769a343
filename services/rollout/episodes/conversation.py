"""The other side of an episode: what the policy is shown first, and what each of its answers is answered with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from flotilla.shared.schemas.task import Message, Task
from flotilla.shared.schemas.turns import FinishReason


@dataclass(frozen=True, slots=True)
class Reply:
    """What comes of a completion.

    Attributes:
        messages: shown before the next one.
        reward: for this completion; None where nothing is given.
        finish: why the episode ends here; None where it continues.
        state: of the environment, that the next turn begins in.
        is_fresh: whether the messages are a whole prompt, and the next completion sees nothing before them.
    """

    messages: tuple[Message, ...] = ()
    reward: float | None = None
    finish: FinishReason | None = None
    state: int | None = None
    is_fresh: bool = False


class Conversation(Protocol):
    """One episode's other side. What it raises is an ``EpisodeFailed``: the episode becomes an error.

    Started again with the same task and given the same answers, it repeats itself; one that cannot declares so by
    ``is_replayable``, and its episodes begin afresh when they change hands.
    """

    is_replayable: bool

    @property
    def metrics(self) -> Mapping[str, float]:
        """What it measured so far, by ``NAME/METRIC``."""

    async def begin(self) -> Reply:
        """Return the whole first prompt."""

    async def answer(self, text: str, *, is_cut: bool) -> Reply:
        """Take a completion; ``is_cut`` where it reached the most tokens of a turn."""

    async def close(self) -> None:
        """Release what it holds."""


ConversationOpener = Callable[[Task, int], Conversation]
"""Opens the other side of one member's episode."""
