"""What an environment is, and how a text becomes an action.

The contract is the one of gymnasium, with text for actions, and for observations text, or parts of which some are
images; so environments written for it (or for GEM and ROLL) run as they are.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from flotilla.shared.schemas.task import Task

Info = Mapping[str, Any]
"""An environment's info beside the observation; all of it is optional.

``instruction`` (of ``reset``): put before the first observation where the task has no prompt of its own.
``metrics``: numbers by name, of the episode so far; those of the last step count. ``success`` is shown as such.
``state``: anything that equal states of the environment share, for estimators that compare steps (gigpo); the
observation where it is left out.
``action`` and ``is_valid`` (of ``step``): what the text was read as, and whether that is an action; the whole text, and
True, where they are left out. ``remembered``: what later turns are shown in the observation's place.
"""
Observation = str | Sequence[Mapping[str, Any]]
"""What is shown: a text, or parts as OpenAI writes them, ``{"type": "text", "text": ...}`` and
``{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}``, or ``{"type": "image", "image": bytes}``
of an encoded image."""
Step = tuple[Observation, float, bool, bool, Info]
"""Observation, reward, whether the episode is over, whether a limit of the environment's own ended it, and info."""


class Environment(Protocol):
    """A task that answers each text with an observation and a reward. Same seed, same episode.

    Methods may be coroutines. A plain one of an environment that is not ours runs on a thread. A ``reset`` with a
    parameter ``row`` is given the task's, see ``row_of``.
    """

    def reset(self, seed: int) -> tuple[Observation, Info]:
        """Begin an episode."""

    def step(self, text: str) -> Step:
        """Take what the policy wrote."""


ROW: Final = "row"


def row_of(task: Task) -> dict[str, Any]:
    """Make what environments see of a row: its columns, ``label``, ``data_source``, and ``prompt``.

    ``prompt`` is the text of the task's last message of the user's; "" where it has none.
    """
    said = next((each.content for each in reversed(task.messages) if each.role == "user"), "")
    return {**task.metadata, "label": task.label, "data_source": task.data_source, "prompt": said}


def reset(environment: Any, seed: int, row: Mapping[str, Any]) -> Any:
    """Reset an environment, with the row if it takes one; what it returns may be awaitable."""
    if ROW in inspect.signature(environment.reset).parameters:
        return environment.reset(seed, **{ROW: row})
    return environment.reset(seed)


THOUGHT_END = "</think>"
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def without_thought(text: str) -> str:
    """Leave out a reasoning model's thoughts."""
    return text.rpartition(THOUGHT_END)[2]


class ActionTable:
    """Reads one of a few named actions.

    Args:
        names: of the actions, in the order of their numbers.
        pattern: a regular expression whose last group is the action; the first match counts. None: what is between
            ``<answer>`` and ``</answer>``, or the whole text where there is no such mark.
    """

    def __init__(self, names: Sequence[str], pattern: str | None = None) -> None:
        self._numbers = {name.casefold(): number for number, name in enumerate(names)}
        self._pattern = re.compile(pattern, re.DOTALL) if pattern is not None else None

    def read(self, text: str) -> int | None:
        """Return the number of the action; None if the text names none."""
        return self._numbers.get(self._written(text).casefold())

    def told(self, text: str) -> Mapping[str, Any]:
        """Parse an environment's info; see ``Info``."""
        return {"action": self._written(text), "is_valid": self.read(text) is not None}

    def _written(self, text: str) -> str:
        text = without_thought(text)
        found = (self._pattern or ANSWER).search(text)
        if found is None:
            return text.strip() if self._pattern is None else ""
        return str(found.group(found.re.groups)).strip()


def answer_of(text: str) -> str:
    """Read what is between ``<answer>`` and ``</answer>``, or the whole text where there is no such mark."""
    text = without_thought(text)
    found = ANSWER.search(text)
    return (text if found is None else found.group(1)).strip()


class Validity:
    """The share of an episode's actions that could be read, and whether it succeeded, as metrics."""

    def __init__(self) -> None:
        self._read = self._all = 0

    def count(self, is_valid: bool) -> None:
        """Count an action."""
        self._read += is_valid
        self._all += 1

    def metrics(self, success: bool) -> dict[str, float]:
        """Make the metrics so far."""
        return {"success": float(success), "action_is_valid": self._read / max(1, self._all)}
