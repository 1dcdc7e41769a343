"""An environment of the user's, as the rollout sees it: it runs in a process of its own."""

from collections.abc import Awaitable, Callable

from flotilla.services.rollout.custom.process import CustomProcess
from flotilla.services.rollout.environments.base import Info, Step
from flotilla.shared.config.sections.episodes import EnvironmentConfig


class ProcessEnvironment:
    """An environment of one episode, in that process.

    Attributes:
        name: of its class.
    """

    def __init__(self, process: CustomProcess, number: int, name: str) -> None:
        self._process, self._number = process, number
        self.name = name

    async def reset(self, seed: int) -> tuple[str, Info]:
        """See ``Environment.reset``."""
        observation, info = await self._process.ask("reset", self._number, seed)
        return observation, info

    async def step(self, text: str) -> Step:
        """See ``Environment.step``."""
        observation, reward, is_terminated, is_truncated, info = await self._process.ask("step", self._number, text)
        return observation, reward, is_terminated, is_truncated, info

    async def close(self) -> None:
        """Close it, if it can be closed, and forget it."""
        await self._process.ask("close", self._number, None)


def maker_of(process: CustomProcess, config: EnvironmentConfig) -> Callable[[], Awaitable[ProcessEnvironment]]:
    """Return what makes an environment there, for one episode."""

    async def make() -> ProcessEnvironment:
        return ProcessEnvironment(process, await process.make(config), config.environment.rpartition(":")[2])

    return make
