"""Calls of a child process from threads: the same client, on an event loop of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from anyio.from_thread import BlockingPortal, start_blocking_portal

from flotilla.shared.children.calls import CallProcess


class BlockingCalls:
    """A process that was started; several threads may call at once.

    Attributes:
        about: what it says of what it loaded.
    """

    def __init__(self, process: CallProcess, portal: BlockingPortal, about: Any) -> None:
        self._process, self._portal, self.about = process, portal, about

    def call(self, content: object, *, seconds: float | None) -> Any:
        """Start the process where it died, and ask it; see ``CallProcess.call``."""

        async def call() -> Any:
            await self._process.start()
            return await self._process.call(content, seconds=seconds)

        return self._portal.call(call)


@contextmanager
def running(process: CallProcess) -> Iterator[BlockingCalls]:
    """Start a process, and end it afterwards; blocks. Errors are those of ``CallProcess.start``."""
    with start_blocking_portal() as portal:
        try:
            yield BlockingCalls(process, portal, portal.call(process.start))
        finally:
            portal.call(process.aclose)
