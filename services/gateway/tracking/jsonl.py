"""A JSONL file as a tracker: a record is a line, with its cursor."""

import json
import os
from collections.abc import Sequence
from typing import BinaryIO

from flotilla.services.gateway.tracking.base import Record, TrackedRun, open_own, own_folder
from flotilla.shared.clock import rfc3339
from flotilla.shared.config.sections.tracking import JsonlTrackerConfig

TAIL_BYTES = 1 << 20


class JsonlTracker:
    """Appends lines; half a line, which a crash may leave, is cut off when the file is opened again."""

    def __init__(self, config: JsonlTrackerConfig, run: TrackedRun) -> None:
        self.path = own_folder(config.directory, run) / "metrics.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open_own(config.directory, run, self.path.name)
        self._cursor = _cut_after_last_line(self._file)

    def cursor(self) -> int:
        """Return the cursor of the last whole line."""
        return self._cursor

    def write(self, records: Sequence[Record]) -> None:
        """Append a line per record."""
        lines = b"".join(json.dumps(_line(record), separators=(",", ":")).encode() + b"\n" for record in records)
        written = self._file.write(lines)
        if written != len(lines):
            raise OSError(f"only {written} of {len(lines)} bytes went into {self.path}")
        os.fsync(self._file.fileno())
        self._cursor = records[-1].cursor

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _line(record: Record) -> dict[str, object]:
    return {
        "step": record.step,
        "version": record.version,
        "at": rfc3339(record.at),
        "cursor": record.cursor,
        "values": dict(record.values),
    }


def _cut_after_last_line(file: BinaryIO) -> int:
    """Drop what follows the last whole line, and return that line's cursor, 0 if there is none; ends at its end."""
    size = file.seek(0, os.SEEK_END)
    tail_bytes = TAIL_BYTES
    while True:
        start = max(size - tail_bytes, 0)
        file.seek(start)
        whole, newline, _ = file.read(size - start).rpartition(b"\n")
        if start == 0 or b"\n" in whole:
            break
        tail_bytes *= 2
    end = start + len(whole) + len(newline)
    file.truncate(end)
    file.seek(end)
    last = whole.rpartition(b"\n")[2]
    return int(json.loads(last)["cursor"]) if last else 0
