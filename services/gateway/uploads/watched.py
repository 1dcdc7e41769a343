"""Calls of a store that may hang, off the event loop: given up when nothing moves any more."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from flotilla.shared.concurrency.daemon_threads import on_daemon_thread
from flotilla.shared.errors import Unavailable

SILENT_SECONDS = 600.0
"""A store that takes or gives no byte, and ends no call, for so long does not answer."""
LOOK_SECONDS = 1.0
LEAVE_SECONDS = 5.0
"""What a call in progress returns when it is no longer awaited."""

Answer = TypeVar("Answer")
Work = Callable[[threading.Event, Callable[[], None]], Answer]
"""What is done: it ends early when the event is set, and calls the function whenever something moved."""


class WatchedCalls:
    """Calls of one store, one at a time.

    Args:
        url: names it.
        silent_seconds: without anything that moves, after which a call is given up; None: ``SILENT_SECONDS``.
    """

    def __init__(self, url: str, silent_seconds: float | None = None) -> None:
        self._url, self._silent_seconds = url, silent_seconds
        self._left: asyncio.Future[Any] | None = None

    async def run(self, work: Work[Answer]) -> Answer:
        """Do it on a thread.

        Raises:
            Unavailable: the store does not answer, or a call that was given up before has not ended yet.
        """
        if self._left is not None and not self._left.done():
            raise Unavailable(f"{self._url} does not answer: a call that was given up has not ended")
        silent_seconds = SILENT_SECONDS if self._silent_seconds is None else self._silent_seconds
        stop, moved_at = threading.Event(), time.monotonic()

        def moved() -> None:
            nonlocal moved_at
            moved_at = time.monotonic()

        working = on_daemon_thread(lambda: work(stop, moved), "store")
        try:
            while not working.done():
                await asyncio.wait({working}, timeout=LOOK_SECONDS)
                if not working.done() and time.monotonic() - moved_at > silent_seconds:
                    self._leave(working, stop)
                    raise Unavailable(f"{self._url} does not answer: nothing moved for {silent_seconds:g} s")
        except asyncio.CancelledError:
            # A call cannot be interrupted: it ends with the file that it is at.
            self._leave(working, stop)
            await asyncio.wait({working}, timeout=LEAVE_SECONDS)
            raise
        return working.result()

    def _leave(self, working: "asyncio.Future[Any]", stop: threading.Event) -> None:
        stop.set()
        self._left = working
        working.add_done_callback(lambda done: done.cancelled() or done.exception())
