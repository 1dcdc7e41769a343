"""How much of its time a rollout sampled, measured exactly."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class BusyTime:
    """Time in which at least one group was being sampled, and time in which none was.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._busy_seconds = 0.0
        self._busy_since = 0.0
        self._num_groups = 0

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Count the block as one group's sampling; blocks may overlap."""
        if self._num_groups == 0:
            self._busy_since = self._clock()
        self._num_groups += 1
        try:
            yield
        finally:
            self._num_groups -= 1
            if self._num_groups == 0:
                self._busy_seconds += self._clock() - self._busy_since

    def to_load(self) -> dict[str, float]:
        """Return both as gauges, in seconds since it began; they only grow, so that their differences are a span's."""
        now = self._clock()
        busy = self._busy_seconds + (now - self._busy_since if self._num_groups else 0.0)
        return {"busy_seconds": busy, "idle_seconds": now - self._started - busy}
