"""How soon the fork server of a slot is started again when what it ran has ended it.

A start takes as much of the processors as a dozen short programs do. So the pauses grow between starts of one slot that
follow each other because of programs, whatever runs in between; who has the slot keeps it meanwhile, so that nobody
else waits; and what the start takes is counted as the caller's own use.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from flotilla.shared.children.restarts import Restarts

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.25, 8.0
"""A server that a program has ended is started again after the first; each pause is twice as long as the one before."""
WINDOW_SECONDS = 60.0
"""For how long an end counts."""
MOST_ENDS = 64


class ServerRestarts:
    """Knows which fork servers were ended by what they ran, and for whom.

    Args:
        now: a monotonic clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._restarts: dict[int, Restarts] = {}
        self._due: dict[int, float] = {}
        self._owed: dict[int, str] = {}
        self._closing = asyncio.Event()
        self.num_ended = 0
        """How often what a server ran has ended it."""

    def ended(self, slot: int, caller: str) -> None:
        """Note that the server of a slot was ended by a program of a caller, or because it was given up."""
        self.num_ended += 1
        restarts = self._restarts.get(slot)
        if restarts is None:
            restarts = self._restarts[slot] = Restarts(
                MOST_ENDS,
                window_seconds=WINDOW_SECONDS,
                first_pause_seconds=FIRST_PAUSE_SECONDS,
                longest_pause_seconds=LONGEST_PAUSE_SECONDS,
                now=self._now,
            )
        pause = restarts.died()
        self._due[slot] = self._now() + (LONGEST_PAUSE_SECONDS if pause is None else pause)
        self._owed[slot] = caller

    async def due(self, slot: int) -> None:
        """Wait until the server of a slot may be started; at once when the service stops."""
        if (left := self._due.get(slot, 0.0) - self._now()) > 0.0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._closing.wait()

    def charged(self, slot: int) -> str | None:
        """Tell to whom a start is to be counted that has just been made, once; None: to nobody."""
        self._due.pop(slot, None)
        return self._owed.pop(slot, None)

    def num_backing_off(self, slots: Iterable[int]) -> int:
        """Count those of some slots whose server may not be started yet."""
        now = self._now()
        return sum(self._due.get(slot, 0.0) > now for slot in slots)

    def close(self) -> None:
        """Let nobody wait any more."""
        self._closing.set()
