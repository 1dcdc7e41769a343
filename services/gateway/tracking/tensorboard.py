"""TensorBoard as a tracker: one event file per run, in which marks say how far it came."""

import os
import re
import time
from collections.abc import Sequence
from typing import BinaryIO

from flotilla.services.gateway.tracking.base import Record, TrackedRun, open_own, own_folder
from flotilla.services.gateway.tracking.events_file import framed, mark_event, scalar_event, unframed, version_event
from flotilla.shared.config.sections.tracking import TensorboardTrackerConfig

PATTERN = "events.out.tfevents.*.flotilla"
MARK = re.compile(rb"flotilla cursor (\d+)$")
LARGEST = 3.4028234663852886e38
"""Of float32, which is all that the format has."""


class TensorboardTracker:
    """Appends events; what follows the last mark, which a crash may leave, is cut off on opening again."""

    def __init__(self, config: TensorboardTrackerConfig, run: TrackedRun) -> None:
        below = "tensorboard/" if config.directory is None else ""
        folder = own_folder(config.directory, run) / below
        folder.mkdir(parents=True, exist_ok=True)
        found = sorted(folder.glob(PATTERN))
        self.path = found[-1] if found else folder / f"events.out.tfevents.{int(time.time())}.flotilla"
        self._file = open_own(config.directory, run, f"{below}{self.path.name}")
        self._cursor = _cut_after_last_mark(self._file)
        if self._file.tell() == 0:
            self._append(framed(version_event(time.time())))

    def cursor(self) -> int:
        """Return the cursor of the last mark."""
        return self._cursor

    def write(self, records: Sequence[Record]) -> None:
        """Append an event per value, and a mark."""
        events = [
            scalar_event(record.at, record.step, name, max(-LARGEST, min(value, LARGEST)))
            for record in records
            for name, value in record.values.items()
        ]
        cursor = records[-1].cursor
        events.append(mark_event(records[-1].at, f"flotilla cursor {cursor}"))
        self._append(b"".join(map(framed, events)))
        self._cursor = cursor

    def _append(self, data: bytes) -> None:
        written = self._file.write(data)
        if written != len(data):
            raise OSError(f"only {written} of {len(data)} bytes went into {self.path}")
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _cut_after_last_mark(file: BinaryIO) -> int:
    data = file.read()
    cursor = end = 0
    for number, (event, after) in enumerate(unframed(data)):
        mark = MARK.search(event)
        if mark is not None:
            cursor, end = int(mark[1]), after
        elif number == 0:
            end = after
    file.truncate(end)
    file.seek(end)
    return cursor
