"""What takes the processor for long runs beside the event loop, which has health, leases and streams to serve."""

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

MOST_AT_A_TIME: Final = 2
"""Of the threads that the process has for such work: weights are checked and staged on them, too."""

Result = TypeVar("Result")


class Threads:
    """Runs work on threads, so much at a time; what is more waits, in order."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(MOST_AT_A_TIME)

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run work that reads what the loop may append to meanwhile, and changes nothing.

        Cancelling leaves it running, in its place, until it ends.
        """
        await self._places.acquire()
        working = asyncio.ensure_future(asyncio.to_thread(work))
        working.add_done_callback(self._ended)
        return await asyncio.shield(working)

    def _ended(self, working: "asyncio.Future[Result]") -> None:
        self._places.release()
        if not working.cancelled():
            working.exception()  # whoever asked may be gone
