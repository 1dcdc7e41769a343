"""Outside commands to the loop: continue, pause, stop. They take effect at step boundaries and while waiting."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from flotilla.shared.schemas.service import WorkState

Answer = TypeVar("Answer")


class ToldToEnd(Exception):
    """The work was stopped before the first step could begin: there is nothing to keep."""


class RunControl:
    """The switch between the commander and the loop.

    Args:
        on_state: called on each change of the loop's state.
    """

    def __init__(self, on_state: Callable[[WorkState], None]) -> None:
        self._on_state = on_state
        self._may_run = asyncio.Event()
        self._may_run.set()
        self._stopped = asyncio.Event()
        self.is_over = False
        """Whether no trainer continues with this experiment after the stop."""
        self.state = WorkState.STARTING

    @property
    def is_stopped(self) -> bool:
        """Whether the loop shall end."""
        return self._stopped.is_set()

    @property
    def is_paused(self) -> bool:
        """Whether no further step shall begin for now."""
        return not self._may_run.is_set()

    def resume(self) -> None:
        """Continue."""
        self._may_run.set()

    def pause(self) -> None:
        """Start no further step."""
        self._may_run.clear()

    def stop(self, *, is_over: bool = False) -> None:
        """End after the step under way.

        Args:
            is_over: no trainer continues after it, so that all that was trained has to be durable then.
        """
        self.is_over |= is_over
        self._stopped.set()
        self._may_run.set()

    def become(self, state: WorkState) -> None:
        """Return what the loop does now."""
        if state is not self.state:
            self.state = state
            self._on_state(state)

    async def may_go_on(self) -> bool:
        """Wait out a pause; False if the loop shall end."""
        if not self._may_run.is_set():
            self.become(WorkState.PAUSED)
            await self._may_run.wait()
        if self.is_stopped:
            return False
        self.become(WorkState.RUNNING)
        return True

    async def until_stopped(self) -> None:
        """Wait until the loop shall end."""
        await self._stopped.wait()

    async def unless_stopped(self, work: Coroutine[Any, Any, Answer]) -> Answer | None:
        """Do the work, but give it up when the loop shall end: then None."""
        doing = asyncio.create_task(work)
        stopping = asyncio.create_task(self._stopped.wait())
        try:
            await asyncio.wait({doing, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return doing.result() if doing.done() else None
        finally:
            stopping.cancel()
            doing.cancel()
            await asyncio.gather(doing, stopping, return_exceptions=True)
