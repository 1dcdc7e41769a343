"""Time as a dependency, so that tests do not wait for it."""

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
    """A clock that moves only when told."""

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


def rfc3339(seconds: float) -> str:
    """Format a time as RFC 3339 in UTC with milliseconds."""
    return datetime.fromtimestamp(seconds, tz=UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
