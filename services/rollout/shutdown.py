"""How a service leaves: it has a notice, in which it claims nothing and finishes what it can.

The notice is given by the gateway or by a signal; whichever ends first counts. Shortly before its end the engine is
interrupted, and what is unfinished is handed over with the tokens that it has. A notice that is shorter than handing
over takes leaves no time to finish anything: the engine is interrupted at once.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from flotilla.services.rollout.consumer import RolloutConsumer
from flotilla.shared.schemas.service import DRAIN_NOTICE_SECONDS, DesiredState, WorkState

HAND_OVER_SECONDS = 3.0
"""Kept of a notice for handing over; a step of the engine and one call to the data plane take far less."""
POLL_SECONDS = 0.02


class GracefulShutdown:
    """Until when a service may work."""

    def __init__(self) -> None:
        self._by_gateway: float | None = None
        self._by_signal: float | None = None
        self._interrupted_at: float | None = None
        self.has_left = asyncio.Event()
        """Set once nothing is left to do before the process may end."""

    def take(self, desired: DesiredState) -> None:
        """Record the gateway's desired state; its notice is what is left of it now."""
        if desired.state is not WorkState.DRAINING:
            self._by_gateway = None
            self._interrupted_at = None
        elif desired.notice_seconds is not None:
            self._by_gateway = time.monotonic() + desired.notice_seconds
        elif self._by_gateway is None:
            self._by_gateway = time.monotonic() + DRAIN_NOTICE_SECONDS

    def leave(self, notice_seconds: float) -> None:
        """Leave for good within so many seconds, whatever the gateway says."""
        self._by_signal = time.monotonic() + notice_seconds

    @property
    def is_for_good(self) -> bool:
        """Whether the process ends afterwards."""
        return self._by_signal is not None

    @property
    def seconds_left(self) -> float:
        """What is left of the notice."""
        ends = [end for end in (self._by_gateway, self._by_signal) if end is not None]
        return min(ends, default=time.monotonic() + DRAIN_NOTICE_SECONDS) - time.monotonic()

    async def finish(self, worker: RolloutConsumer, has_news: Callable[[], bool]) -> bool:
        """Let the worker finish what it can, and hand over the rest.

        Returns:
            False if there was news first: look again what is wanted, then go on.
        """
        worker.pause()
        while not worker.is_idle:
            now = time.monotonic()
            if self._interrupted_at is None and self.seconds_left <= HAND_OVER_SECONDS:
                self._interrupted_at = now
                await _interrupt(worker)
            is_over = self._interrupted_at is not None and now - self._interrupted_at >= HAND_OVER_SECONDS
            if is_over and self.seconds_left <= 0:
                break
            await asyncio.sleep(POLL_SECONDS)
            if has_news():
                return False
        self._interrupted_at = None
        return True


async def hand_over(worker: RolloutConsumer) -> None:
    """Interrupt a worker at once, and wait until it has handed over what it has, or cannot."""
    await _interrupt(worker)
    for _ in range(round(HAND_OVER_SECONDS / POLL_SECONDS)):
        if not worker.in_work:
            return
        await asyncio.sleep(POLL_SECONDS)


async def _interrupt(worker: RolloutConsumer) -> None:
    # An engine that does not end its requests in time keeps nobody: their tasks are handed back without them.
    with suppress(TimeoutError):
        async with asyncio.timeout(HAND_OVER_SECONDS):
            await worker.interrupt()
