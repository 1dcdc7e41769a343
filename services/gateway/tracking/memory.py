"""The tracker's twin in memory, for tests."""

from collections.abc import Sequence

from flotilla.services.gateway.tracking.base import Record


class MemoryTracker:
    """Keeps records in a list; see ``Tracker``."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.is_closed = False

    def cursor(self) -> int:
        """Return the cursor of the last record."""
        return self.records[-1].cursor if self.records else 0

    def write(self, records: Sequence[Record]) -> None:
        """Keep the records."""
        self.records.extend(records)

    def close(self) -> None:
        """Remember that it was closed."""
        self.is_closed = True
