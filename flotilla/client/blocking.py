"""What all calls without ``await`` share: an asynchronous client, whose event loop is on a thread of its own.

Not anyio's portal: its thread is joined at exit, so that a script that forgot to close its client would never end.
"""

import asyncio
import copy
import threading
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import suppress
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Concatenate, ParamSpec, Self, TypeVar

from flotilla.client.calls import CALL_SECONDS, Calls
from flotilla.connection import DEFAULT_DATA

Result = TypeVar("Result")
Params = ParamSpec("Params")
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


class BlockingCalls:
    """Calls one gateway without ``await``; arguments and errors are those of :class:`Calls`."""

    client_class: ClassVar[type[Calls]] = Calls

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        data: str | Path = DEFAULT_DATA,
        deadline_seconds: float = CALL_SECONDS,
    ) -> None:
        async def connected() -> Calls:
            return self.client_class(url, token, data=data, deadline_seconds=deadline_seconds)

        self._thread = LoopThread()
        try:
            self._client = self._thread.call(connected)
        except BaseException:
            self._thread.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end the thread; a second time nothing is left to do."""
        if self._thread.is_closed:
            return
        try:
            self._thread.call(self._client.close)
        finally:
            self._thread.close()

    @property
    def base_url(self) -> str:
        """The gateway's URL."""
        return self._client.base_url

    def with_deadline(self, seconds: float) -> Self:
        """Return the same client with another deadline for each call; both share their connections and thread."""
        other = copy.copy(self)
        other._client = self._client.with_deadline(seconds)
        return other

    def _each(self, items: AsyncGenerator[Result, None]) -> Iterator[Result]:
        async def next_one() -> tuple[Result] | None:
            async for found in items:
                return (found,)
            return None

        try:
            while (found := self._thread.call(next_one)) is not None:
                yield found[0]
        finally:
            self._thread.call(items.aclose)


def waiting(
    method: Callable[Concatenate[Any, Params], Awaitable[Result]],
) -> Callable[Concatenate[BlockingCalls, Params], Result]:
    """Make the method of a blocking client that waits for what a method of the asynchronous one returns."""

    @wraps(method)
    def called(self: BlockingCalls, /, *arguments: Params.args, **options: Params.kwargs) -> Result:
        return self._thread.call(lambda: method(self._client, *arguments, **options))

    return called


def following(
    method: Callable[Concatenate[Any, Params], AsyncGenerator[Result, None]],
) -> Callable[Concatenate[BlockingCalls, Params], Iterator[Result]]:
    """Make the method of a blocking client that waits for one item after the other."""

    @wraps(method)
    def followed(self: BlockingCalls, /, *arguments: Params.args, **options: Params.kwargs) -> Iterator[Result]:
        return self._each(method(self._client, *arguments, **options))

    return followed
