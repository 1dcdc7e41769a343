"""An environment of the gymnasium package whose observations and actions are made text."""

import re
from collections.abc import Mapping
from typing import Any

from flotilla.services.rollout.environments.base import Info, Step, answer_of
from flotilla.shared.errors import InvalidSpec
from flotilla.shared.net.absence import absent_or

NUMBER = re.compile("-?[0-9]{1,18}")


class GymnasiumText:
    """Wraps ``gymnasium.make(name)``: an action is its number, or the text itself where the action space is Text.

    Args:
        name: of the environment, such as ``CliffWalking-v1``.
        format_penalty: reward of a text that is no action; nothing is done then.
        options: keyword arguments of ``make``.

    Raises:
        InvalidSpec: gymnasium is not installed, has no such environment, or its actions are neither numbers nor text.
    """

    def __init__(self, name: str, *, format_penalty: float = 0.0, **options: Any) -> None:
        try:
            import gymnasium
        except ImportError as error:
            raise InvalidSpec(
                f"the environment gymnasium:{name} needs the package gymnasium, which is absent"
            ) from error
        try:
            self._made = gymnasium.make(name, **{"disable_env_checker": True, **options})
        except Exception as error:  # whatever an environment's constructor raises
            raise absent_or(
                error, InvalidSpec(f"gymnasium:{name} cannot be made: {type(error).__name__}: {error}")
            ) from error
        space = self._made.action_space
        self._is_text = isinstance(space, gymnasium.spaces.Text)
        if not self._is_text and not isinstance(space, gymnasium.spaces.Discrete):
            raise InvalidSpec(
                f"gymnasium:{name} has actions of {type(space).__name__}: only Discrete and Text are read"
            )
        self._space: Any = space
        self._format_penalty = format_penalty
        self._shown = ""

    def reset(self, seed: int) -> tuple[str, Info]:
        """Begin an episode; seeds of gymnasium have 31 bits."""
        observation, info = self._made.reset(seed=seed % 2**31)
        self._shown = self._text(observation)
        return self._shown, _known(info)

    def step(self, text: str) -> Step:
        """Act."""
        action = self._action(answer_of(text))
        if action is None:
            return self._shown, self._format_penalty, False, False, {}
        observation, reward, is_terminated, is_truncated, info = self._made.step(action)
        self._shown = self._text(observation)
        return self._shown, float(reward), bool(is_terminated), bool(is_truncated), _known(info)

    def _action(self, text: str) -> Any:
        if self._is_text:
            return text
        if NUMBER.fullmatch(text) is None:
            return None
        number = int(text)
        return number if self._space.contains(number) else None

    def _text(self, observation: Any) -> str:
        if isinstance(observation, str):
            return observation
        rendered = self._made.render() if self._made.render_mode == "ansi" else None
        return str(observation) if rendered is None else str(rendered)


def _known(info: Mapping[str, Any]) -> Info:
    return {name: info[name] for name in ("instruction", "metrics", "state") if name in info}
