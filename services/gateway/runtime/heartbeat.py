"""How long this process was suspended: stopped by a signal, frozen with its machine, or held up by code that blocks.

No report was received in that time, so it must not end a lease or a deadline. The event loop beats on its own,
whatever else waits: a reconciliation that takes long while the loop turns is not a standstill.
"""

import asyncio
from collections.abc import Callable

BEAT_SECONDS = 0.25
OVERSLEPT_SECONDS = 1.0
"""A beat that comes so much later than it should means that this process was suspended."""


class Heartbeat:
    """Beats, and reports each standstill once.

    Args:
        now: reads the clock that leases and deadlines are measured with, in seconds.
        on_standstill: called with how long it lasted, in seconds, before anything can act on the time that has passed.
    """

    def __init__(self, now: Callable[[], float], on_standstill: Callable[[float], None]) -> None:
        self._now = now
        self._on_standstill = on_standstill
        self._beat_at: float | None = None

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(BEAT_SECONDS)

    def look(self) -> None:
        """Compare with the last beat; call it in the same turn of the loop as a look at leases or deadlines."""
        now = self._now()
        before, self._beat_at = self._beat_at, now
        overslept = 0.0 if before is None else now - before - BEAT_SECONDS
        if overslept > OVERSLEPT_SECONDS:
            self._on_standstill(overslept)
