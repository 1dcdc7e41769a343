"""Signals that wake whoever waits for a change, without polling; and how tasks are ended."""

import asyncio
from collections.abc import Iterable
from itertools import islice
from typing import Any

RETRY_SECONDS = 0.5
FIRE_AT_ONCE = 128
"""Signals that are fired in one turn of the loop: about eight milliseconds of work for those that wait."""


class Signal:
    """Take ``next`` before looking at what may change, look, then wait for it: no change is missed."""

    def __init__(self) -> None:
        self._next: asyncio.Future[None] | None = None

    def fire(self) -> None:
        """Wake all that wait now."""
        fired, self._next = self._next, None
        if fired is not None and not fired.done():
            fired.set_result(None)

    @property
    def next(self) -> asyncio.Future[None]:
        """What the next ``fire`` ends. All that wait share it: wait with ``wait_for_any``, which never cancels it."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        return self._next


def fire_in_turn(signals: Iterable[Signal]) -> None:
    """Fire many signals, some in each turn of the loop, the first ones now.

    A thousand calls that wait would else be answered in one turn, and whoever asked for what has changed after them.
    """
    left = iter(signals)
    is_more = False
    for signal in islice(left, FIRE_AT_ONCE):
        is_more = True
        signal.fire()
    if is_more:
        asyncio.get_running_loop().call_soon(fire_in_turn, left)


async def wait_for_any(timeout_seconds: float | None, *futures: asyncio.Future[Any]) -> bool:
    """Wait until one of the futures is done; False if the time was over first.

    They are left as they are. No task is made: thousands of calls wait here at once.
    """
    loop = asyncio.get_running_loop()
    woken = loop.create_future()

    def wake(_done: asyncio.Future[Any] | None = None) -> None:
        if not woken.done():
            woken.set_result(None)

    if any(future.done() for future in futures):
        return True
    for future in futures:
        future.add_done_callback(wake)
    timer = None if timeout_seconds is None else loop.call_later(timeout_seconds, wake)
    try:
        await woken
    finally:
        if timer is not None:
            timer.cancel()
        for future in futures:
            future.remove_done_callback(wake)
    return any(future.done() for future in futures)


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks until every one of them has ended; their errors are theirs.

    Once is not enough: a cancellation that meets the end of a call to Redis is sometimes lost inside the client
    library, and whoever awaited the task would wait forever.
    """
    is_cancelled = False
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        try:
            await asyncio.wait(pending, timeout=RETRY_SECONDS)
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled:
        raise asyncio.CancelledError


async def run_together(*tasks: asyncio.Task[Any]) -> None:
    """Run tasks until the first of them fails or all are done; end the others, and raise the failure."""
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        await end(*tasks)
