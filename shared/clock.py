"""Time as a dependency, so that tests do not wait for it."""

import math
import time
from datetime import UTC, datetime
from typing import Protocol

from flotilla.shared.faults.armed import armed


class Clock(Protocol):
    """Where a component reads the time."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start; never goes back."""

    def now(self) -> float:
        """Seconds since the epoch."""


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start; never goes back, and does not count while the machine is suspended."""
        return time.monotonic()

    def now(self) -> float:
        """Seconds since the epoch."""
        faults = armed()
        return time.time() if faults is None else time.time() + faults.skew_seconds()


class ManualClock:
    """A clock that moves only by ``advance``."""

    def __init__(self, start: float = 1_000_000.0) -> None:
        self.time = start

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        self.time += seconds

    def monotonic(self) -> float:
        """Seconds from an arbitrary start."""
        return self.time

    def now(self) -> float:
        """Seconds since the epoch."""
        return self.time


def pause_after(
    num_failures: int, first_seconds: float, longest_seconds: float = math.inf, *, growth: float = 2.0
) -> float:
    """Return how long to wait before what failed is tried again: the one rule for calls, starts and restarts.

    Args:
        num_failures: in a row, from 1 on.
        first_seconds: after the first of them.
        longest_seconds: no pause is longer.
        growth: each pause over the one before.
    """
    try:
        return min(first_seconds * growth ** (num_failures - 1), longest_seconds)
    except OverflowError:  # of an absence of days
        return longest_seconds


class Pauses:
    """Counts failures, and returns by ``pause_after`` how long to wait after each."""

    def __init__(self, first_seconds: float, longest_seconds: float) -> None:
        self._first_seconds = first_seconds
        self._longest_seconds = longest_seconds
        self._num_failures = 0

    def failed(self) -> float:
        """Count a failure; return the seconds to wait after it."""
        self._num_failures += 1
        return pause_after(self._num_failures, self._first_seconds, self._longest_seconds)

    def reset(self) -> None:
        """Begin with the first pause again: something was achieved."""
        self._num_failures = 0


def rfc3339(seconds: float) -> str:
    """Format a time as RFC 3339 in UTC with milliseconds."""
    return datetime.fromtimestamp(seconds, tz=UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
