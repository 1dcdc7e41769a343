"""How long the admission budget held the feeder, by version: the price of the bound on lag, in seconds."""

from collections.abc import Mapping
from typing import Any, Final

ADMISSION_WAIT: Final = "admission/wait_seconds"


class AdmissionWait:
    """Adds up the time between two looks at the first of which tasks were left to issue and the budget was full.

    Kept in the store every second: the next gateway goes on with it. The time between two gateways counts with neither.

    Attributes:
        total_seconds: over all versions since this gateway began.
    """

    def __init__(self) -> None:
        self._version: int | None = None
        self._seconds = 0.0
        self.total_seconds = 0.0
        self._held_since: float | None = None

    def look(self, version: int, now: float) -> tuple[int, float] | None:
        """Record that the feeder looks again, whatever it will find.

        Args:
            version: that is current.
            now: seconds of a monotonic clock.

        Returns:
            When another version was current at the last look: that version, and the seconds that its budget held the
            feeder. The time up to this look counts with it.
        """
        if self._held_since is not None:
            self._seconds += now - self._held_since
            self.total_seconds += now - self._held_since
            self._held_since = None
        if version == self._version:
            return None
        ended = None if self._version is None else (self._version, self._seconds)
        self._version, self._seconds = version, 0.0
        return ended

    def to_window(self) -> dict[str, Any]:
        """Describe the version whose time has not ended, for ``restore``."""
        return {"version": self._version, "seconds": self._seconds}

    def restore(self, window: Mapping[str, Any]) -> None:
        """Go on where an earlier gateway was, unless this has begun."""
        if self._version is None and window:
            self._version, self._seconds = window["version"], window["seconds"]

    def hold(self, now: float) -> None:
        """Record that the budget admits nothing, up to the next look."""
        self._held_since = now

    def release(self) -> None:
        """Forget that the budget held: something else does now."""
        self._held_since = None
