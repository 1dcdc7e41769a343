"""What a turn with a prompt of its own is shown of the turns before it."""

import re
import sys
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from flotilla.services.rollout.episodes.observations import shown
from flotilla.shared.config.sections.episodes import MemoryConfig

INSTRUCTION: Final = "{instruction}"


def filled(template: str, places: Mapping[str, str]) -> str:
    """Fill a template's placeholders; placeholders inside values are kept."""
    pattern = "|".join(map(re.escape, places))
    return re.sub(pattern, lambda found: places[found[0]], template)


class TurnMemory:
    """The turns of one episode so far, as shown in later ones.

    Args:
        config: how many, and how each is written.
    """

    def __init__(self, config: MemoryConfig) -> None:
        self._config = config
        self._observation = ""
        self._kept: deque[str] = deque(maxlen=min(config.turns, sys.maxsize))
        self._taken = 0

    def seen(self, observation: str) -> None:
        """Take what the turn that begins is shown."""
        self._observation = observation

    def answered(self, text: str, reward: float, info: Mapping[str, Any]) -> None:
        """Take what the turn came to."""
        config = self._config
        is_valid = bool(info.get("is_valid", True))
        template = config.template if is_valid or config.invalid_template is None else config.invalid_template
        action = info.get("action")
        self._taken += 1
        self._kept.append(
            filled(template, {
                "{turn}": str(self._taken),
                "{observation}": self._observation,
                "{action}": shown(text if action is None else action),
                "{reward}": str(reward),
            })
        )  # fmt: skip

    def places(self) -> dict[str, str]:
        """Return what the next turn's template is filled with."""
        return {
            "{history}": self._config.separator.join(filter(None, self._kept)),
            "{turns_taken}": str(self._taken),
            "{turns_remembered}": str(len(self._kept)),
        }
