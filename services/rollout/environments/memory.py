"""What a turn with a prompt of its own is shown of the turns before it."""

import re
from collections.abc import Mapping
from typing import Any, Final

from flotilla.services.rollout.episodes.conversation import shown
from flotilla.shared.config.sections.episodes import MemoryConfig

INSTRUCTION: Final = "{instruction}"


def filled(template: str, places: Mapping[str, str]) -> str:
    """Put values into a template's places; what a value says is no place."""
    pattern = "|".join(map(re.escape, places))
    return re.sub(pattern, lambda found: places[found[0]], template)


class TurnMemory:
    """The turns of one episode so far, as later ones are told of them.

    Args:
        config: how many, and how each is written.
    """

    def __init__(self, config: MemoryConfig) -> None:
        self._config = config
        self._observation = ""
        self._turns: list[str] = []

    def seen(self, observation: str) -> None:
        """Take what the turn that begins is shown."""
        self._observation = observation

    def answered(self, text: str, reward: float, info: Mapping[str, Any]) -> None:
        """Take what the turn came to."""
        config = self._config
        is_valid = bool(info.get("is_valid", True))
        template = config.template if is_valid or config.invalid_template is None else config.invalid_template
        action = info.get("action")
        self._turns.append(
            filled(template, {
                "{turn}": str(len(self._turns) + 1),
                "{observation}": self._observation,
                "{action}": shown(text if action is None else action),
                "{reward}": str(reward),
            })
        )  # fmt: skip

    def places(self) -> dict[str, str]:
        """Return what the next turn's template is filled with."""
        kept = self._turns[max(len(self._turns) - self._config.turns, 0) :]
        return {
            "{history}": self._config.separator.join(filter(None, kept)),
            "{turns_taken}": str(len(self._turns)),
            "{turns_remembered}": str(len(kept)),
        }
