"""When a process that died is started again, and when that is of no use."""

import math
import time
from collections import deque
from collections.abc import Callable

from flotilla.shared.clock import pause_after

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
"""Default pauses between starts."""


class Restarts:
    """Counts deaths. Each pause before the next start is longer than the one before.

    Args:
        limit: so many deaths within the window are too many.
        window_seconds: how long a death counts.
        first_pause_seconds: after the first death.
        growth: each pause over the one before.
        longest_pause_seconds: no pause is longer.
        now: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        limit: int,
        *,
        window_seconds: float = math.inf,
        first_pause_seconds: float = FIRST_PAUSE_SECONDS,
        growth: float = 2.0,
        longest_pause_seconds: float = math.inf,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self._window_seconds = window_seconds
        self._first_pause_seconds = first_pause_seconds
        self._growth = growth
        self._longest_pause_seconds = longest_pause_seconds
        self._now = now
        self._deaths: deque[float] = deque(maxlen=limit)

    def died(self) -> float | None:
        """Count a death; return the seconds until the next start, or None if there should be none."""
        now = self._now()
        self._deaths.append(now)
        recent = sum(now - at < self._window_seconds for at in self._deaths)
        if recent >= self._limit:
            return None
        return pause_after(recent, self._first_pause_seconds, self._longest_pause_seconds, growth=self._growth)

    def forget(self) -> None:
        """Let the deaths so far not count: what was started got further than before."""
        self._deaths.clear()
