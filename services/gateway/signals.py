"""A signal that wakes whoever waits for news, each exactly once, without polling."""

import asyncio


class Signal:
    """Take ``next`` before looking at what may change, look, then wait for it: no news is missed."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def fire(self) -> None:
        """Wake all that wait now."""
        fired, self._next = self._next, asyncio.Event()
        fired.set()

    @property
    def next(self) -> asyncio.Event:
        """The event that the next ``fire`` sets."""
        return self._next


async def wait_for_any(timeout_seconds: float, *events: asyncio.Event) -> bool:
    """Wait until one of the events is set; False if the time was over first."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        done, _ = await asyncio.wait(waiting, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)
    finally:
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
