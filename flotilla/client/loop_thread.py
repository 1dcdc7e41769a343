"""An event loop on a thread of its own, for callers that do not await.

Not anyio's portal: its thread is joined at exit, so that a script that forgot to close its client would never end.
"""

import asyncio
import threading
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

Result = TypeVar("Result")

END_SECONDS = 5.0
"""How long the loop may take to end; at exit the interpreter ends it all the same."""


class LoopThread:
    """Runs coroutines until it is closed, collected, or the interpreter ends."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_serve, args=(self._loop,), name="flotilla client", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _end, self._loop, self._thread)

    @property
    def is_closed(self) -> bool:
        """Whether it runs nothing any more."""
        return not self._end.alive

    def call(self, function: Callable[[], Awaitable[Result]]) -> Result:
        """Run a function on the loop and wait for its result; where the wait is interrupted, it is cancelled.

        Raises:
            RuntimeError: it is closed.
        """
        if self.is_closed:
            raise RuntimeError("the client is closed")

        async def awaited() -> Result:
            return await function()

        future = asyncio.run_coroutine_threadsafe(awaited(), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """End the loop and its thread; a second time nothing is left to do."""
        self._end()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                loop.run_until_complete(task)
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    with suppress(RuntimeError):  # it has ended already
        loop.call_soon_threadsafe(loop.stop)
    if thread is not threading.current_thread():
        thread.join(END_SECONDS)
