"""Ending a block when something happens elsewhere, as ``asyncio.timeout`` does; and not ending what must not be."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Self, TypeVar

Result = TypeVar("Result")


class _Block:
    """The part of a task that we may cancel for a reason; ``error`` is then raised instead of the cancellation."""

    def __init__(self, error: Exception) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._error = task, error
        self._cancellations, self._is_cancelled = task.cancelling(), False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, ended: BaseException | None, _trace: object) -> None:
        # Like asyncio.timeout: the cancellation is taken back, and becomes an error only where there is no other.
        is_ours = self._is_cancelled and self._task.uncancel() <= self._cancellations
        if is_ours and isinstance(ended, asyncio.CancelledError):
            raise self._error from ended

    def cancel(self) -> None:
        """Cancel it; not from within itself."""
        self._is_cancelled = True
        self._task.cancel()


@asynccontextmanager
async def cancelled_by(event: Callable[[], Awaitable[object]], error: Exception, *, name: str) -> AsyncIterator[None]:
    """Cancel the block once what ``event`` waits for has happened.

    Args:
        event: waits; ended with the block. If it raises, nothing is cancelled.
        error: what is raised in the place of the cancellation.
        name: of the task that waits, in logs.

    Raises:
        Exception: ``error``, if the block was cancelled for the event. A cancellation from outside stays one.
    """
    with _Block(error) as block:

        async def wait() -> None:
            await event()
            block.cancel()

        waiting = asyncio.create_task(wait(), name=name)
        try:
            yield
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)


@contextmanager
def cancelled_with(happening: "asyncio.Future[Any]", error: Exception) -> Iterator[None]:
    """Cancel the block once a future is done, at no cost of a task that waits for it; see ``cancelled_by``.

    Args:
        happening: left as it is; one that is cancelled cancels nothing.
        error: what is raised in the place of the cancellation.
    """
    is_over = False
    with _Block(error) as block:

        def call(done: "asyncio.Future[Any]") -> None:
            # It may be called when the block has ended already: callbacks of a future come a turn later.
            if not is_over and not done.cancelled():
                block.cancel()

        happening.add_done_callback(call)
        try:
            yield
        finally:
            is_over = True
            happening.remove_done_callback(call)


class Happening(asyncio.Event):
    """An event that cancels blocks as well, and costs them no task that waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Callable[[], object]] = []

    def set(self) -> None:
        """Let it happen."""
        super().set()
        calls, self._calls = self._calls, []
        for call in calls:
            call()

    @contextmanager
    def cancelling(self, error: Exception) -> Iterator[None]:
        """Cancel the block once this happens; see ``cancelled_by``."""
        handles: list[asyncio.Handle] = []
        with _Block(error) as block:

            def call() -> None:
                # Soon: the block itself may let it happen, and end before it could be cancelled.
                handles.append(asyncio.get_running_loop().call_soon(block.cancel))

            if self.is_set():
                call()
            else:
                self._calls.append(call)
            try:
                yield
            finally:
                if call in self._calls:
                    self._calls.remove(call)
                for handle in handles:
                    handle.cancel()


async def until_done(work: "asyncio.Future[Any]") -> None:
    """Wait for the end of what must not be left half-way, whatever comes of it; never cancels it.

    A caller that is cancelled meanwhile waits all the same, and is cancelled then. However often: a deadline that
    passes and the end of whoever set it are two cancellations.
    """
    is_cancelled = False
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            is_cancelled = True
    if not work.cancelled():
        work.exception()  # retrieved, so that asyncio does not warn
    if is_cancelled:
        raise asyncio.CancelledError


async def to_the_end(work: "asyncio.Future[Result]") -> Result:
    """Return what such work comes to; errors are its own. A cancelled caller does not see them."""
    await until_done(work)
    return work.result()


async def all_of(works: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run them at the same time; return what they come to, in their order.

    None of them is left running: the first error, which is raised, ends the others, and so does a cancellation.
    """
    running = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
