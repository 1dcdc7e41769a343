"""A thread for one tracker: its calls come one after the other, and no one waits for it at the end."""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class TrackerThread:
    """Runs calls in their order. It is a daemon: a call that never returns does not keep the gateway from ending."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    async def run(self, call: Callable[[], T]) -> T:
        """Run a call after those before it; cancelling leaves one that has begun to its own end."""
        future: Future[T] = Future()
        self._calls.put((future, call))
        return await asyncio.wrap_future(future)

    def end(self) -> None:
        """Let it end after the calls that it was given."""
        self._calls.put(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except Exception as error:  # whatever a library raises belongs to whoever waits for the call
                future.set_exception(error)
