"""Turns: where in a trajectory's tokens one exchange begins, where the policy's part of it lies, what came of it.

A trajectory is only appended to. A turn is what the policy was shown since its last turn (the *context*: prompt,
observation, tool results, the template's marks) and then what it sampled. The context of a *fresh* turn is a prompt of
its own: of what is before it in the trajectory the policy saw nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class FinishReason(StrEnum):
    """Why sampling of a completion, or an episode, ended."""

    STOP = "stop"
    """The policy ended it, or the environment did."""
    LENGTH = "length"
    """A completion reached the most tokens of one turn, and that ended the trajectory."""
    TURNS = "turns"
    """The episode reached its most turns."""
    TOKENS = "tokens"
    """The episode's tokens, those that were not sampled included, left no room for another turn, or cannot be shown to
    the engine again."""
    ABORTED = "aborted"
    """It was interrupted and may be gone on with."""

    @property
    def is_truncation(self) -> bool:
        """Whether a limit ended it, and not the policy or the environment."""
        return self in _TRUNCATIONS


_TRUNCATIONS = frozenset({FinishReason.LENGTH, FinishReason.TURNS, FinishReason.TOKENS})


@dataclass(frozen=True, slots=True)
class Turn:
    """One exchange, as positions in the trajectory's tokens: ``start <= sampled < end``.

    Attributes:
        start: its first token: of the prompt in the first turn, of the observation in later ones.
        sampled: the first token that the policy sampled; the turn before ended earlier.
        end: behind its last sampled token, and so where the next turn starts.
        finish_reason: of its completion.
        text: the completion decoded, for environments, graders and people; never re-tokenised.
        observation: what the policy was shown since its last turn, as text; empty in the first turn, whose prompt is
            the group's.
        reward: what the environment gave for it; None where nothing did.
        state: a number that equal states of the environment share, of the state that the turn began in; None where the
            environment does not say.
        is_fresh: whether its context is a whole prompt, behind which nothing before it was seen.
    """

    start: int
    sampled: int
    end: int
    finish_reason: FinishReason
    text: str = ""
    observation: str = ""
    reward: float | None = None
    state: int | None = None
    is_fresh: bool = False

    def to_wire(self) -> dict[str, Any]:
        """Make a plain mapping of it, for msgpack or JSON."""
        wire: dict[str, Any] = {
            "start": self.start,
            "sampled": self.sampled,
            "end": self.end,
            "finish_reason": self.finish_reason.value,
            "text": self.text,
            "observation": self.observation,
            "reward": self.reward,
            "state": self.state,
        }
        return wire | {"is_fresh": True} if self.is_fresh else wire

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> "Turn":
        """Read what ``to_wire`` made, ignoring what a newer sender added."""
        return cls(
            start=wire["start"],
            sampled=wire["sampled"],
            end=wire["end"],
            finish_reason=FinishReason(wire["finish_reason"]),
            text=wire["text"],
            observation=wire["observation"],
            reward=wire["reward"],
            state=wire["state"],
            is_fresh=wire.get("is_fresh", False),
        )


def check_turns(turns: Sequence[Turn], num_tokens: int) -> None:
    """Check that turns follow each other from the first token to the last.

    A turn without context would join two completions, and its first token would have no place of its own.

    Raises:
        ValueError: they do not.
    """
    position = 0
    for turn in turns:
        if not position == turn.start < turn.sampled < turn.end:
            raise ValueError(f"a turn must begin at {position} and have context and completion, got {turn}")
        position = turn.end
    if turns and position != num_tokens:
        raise ValueError(f"the turns end at {position} of {num_tokens} tokens")
