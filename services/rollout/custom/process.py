"""Environments and tools of the user's, as the rollout sees them: they run in one process of their own.

What is asked of it is ``[do, which, given]``: ``make`` an episode's environment (its number, and which of the spec's),
``reset`` it (seed), ``step`` (text), ``close``, and ``call`` a function (which, arguments
and the task's row).
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from flotilla.shared.children.calls import CallProcess
from flotilla.shared.children.processes import python_module
from flotilla.shared.config.sections.episodes import EnvironmentConfig
from flotilla.shared.errors import EpisodeFailed, FlotillaError, WorkerDied

MODULE = "flotilla.services.rollout.custom_code"


class Refused(Exception):
    """A function refuses."""


class CustomProcess:
    """The process of one session; started again by the next episode after it died.

    Args:
        environments: those in files.
        tools: functions, as ``file.py:function``.
    """

    def __init__(self, environments: Sequence[EnvironmentConfig] = (), tools: Sequence[str] = ()) -> None:
        sections = [each.model_dump(mode="json") for each in environments]
        named = [*(each.environment for each in environments), *tools]
        opening = {"environments": sections, "tools": list(tools)}
        self._code = CallProcess(python_module(MODULE), opening, ", ".join(named))
        self._environments = environments
        self._numbers = itertools.count()
        self.needs_row: Sequence[bool] = ()
        """Of each function, whether it takes the task's row; known once it is loaded."""

    async def start(self) -> Sequence[Mapping[str, Any]]:
        """Load all of it, and return the functions' schemas.

        Raises:
            InvalidSpec: something cannot be loaded.
            WorkerDied: the process did not start.
        """
        about = await self._code.start()
        schemas: list[Mapping[str, Any]] = about["schemas"]
        self.needs_row = [bool(each) for each in about["needs_row"]]
        return schemas

    async def restart(self) -> None:
        """Start the process again where it died.

        Raises:
            EpisodeFailed: it cannot be started.
            Unavailable, DeadlineExceeded: it cannot be started now.
        """
        try:
            await self.start()
        except FlotillaError as error:
            if error.retryable:
                raise
            raise EpisodeFailed(error.detail) from error

    async def ask(self, do: str, which: int, given: Any) -> Any:
        """Let it do something.

        Raises:
            Refused: a function refuses.
            EpisodeFailed: the code failed, or its process ended.
        """
        try:
            answer = await self._code.call([do, which, given])
        except WorkerDied as error:
            raise EpisodeFailed(error.detail) from error
        if "refused" in answer:
            raise Refused(str(answer["refused"]))
        if "error" in answer:
            raise EpisodeFailed(str(answer["error"]))
        return answer["value"]

    async def make(self, config: EnvironmentConfig) -> int:
        """Make an environment for one episode, and return its number; a process that died is started again.

        Raises:
            EpisodeFailed: that is impossible.
        """
        await self.restart()
        number = next(self._numbers)
        await self.ask("make", number, self._environments.index(config))
        return number

    async def aclose(self) -> None:
        """End the process."""
        await self._code.aclose()
