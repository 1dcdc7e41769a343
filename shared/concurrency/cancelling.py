"""Ending a block when something happens elsewhere, as ``asyncio.timeout`` does; and not ending what must not be."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

Result = TypeVar("Result")


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
    block = asyncio.current_task()
    assert block is not None
    cancellations, has_happened = block.cancelling(), False

    async def wait() -> None:
        nonlocal has_happened
        await event()
        has_happened = True
        block.cancel()

    try:
        waiting = asyncio.create_task(wait(), name=name)
        try:
            yield
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
    except BaseException as ended:
        # Like asyncio.timeout: the cancellation is taken back, and becomes an error only where there is no other.
        is_ours = has_happened and block.uncancel() <= cancellations
        if is_ours and isinstance(ended, asyncio.CancelledError):
            raise error from ended
        raise


async def until_done(work: "asyncio.Future[Any]") -> None:
    """Wait for the end of what must not be left half-way, whatever comes of it; never cancels it.

    Who is cancelled meanwhile waits all the same, and is cancelled then. However often: a deadline that passes and the
    end of whoever set it are two cancellations.
    """
    is_cancelled = False
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            is_cancelled = True
    if not work.cancelled():
        work.exception()  # seen, whoever wants to know it
    if is_cancelled:
        raise asyncio.CancelledError


async def to_the_end(work: "asyncio.Future[Result]") -> Result:
    """Return what such work comes to; errors are its own. To a caller that is cancelled nothing is told of them."""
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
