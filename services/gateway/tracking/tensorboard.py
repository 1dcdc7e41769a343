"""TensorBoard as a tracker: one event file per run, in which marks say how far it came."""

import os
import re
import struct
import time
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from flotilla.services.gateway.tracking.base import Record, TrackedRun, open_own, own_folder
from flotilla.shared.config.sections.tracking import TensorboardTrackerConfig

PATTERN = "events.out.tfevents.*.flotilla"
MARK = re.compile(rb"flotilla cursor (\d+)$")
LARGEST = 3.4028234663852886e38
"""Of float32, which is all that the format has."""


FILE_VERSION = "brain.Event:2"
CHECKPOINT = 3
"""Of SessionLog.SessionStatus; TensorBoard itself reads only START."""


def _crc_table() -> tuple[int, ...]:
    table = []
    for number in range(256):
        value = number
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return tuple(table)


CRC_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    """Compute the Castagnoli checksum."""
    value = 0xFFFFFFFF
    for byte in data:
        value = CRC_TABLE[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def _masked(data: bytes) -> bytes:
    value = crc32c(data)
    return struct.pack("<I", (((value >> 15) | (value << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def framed(event: bytes) -> bytes:
    """Put an event into the frame that the file consists of."""
    length = struct.pack("<Q", len(event))
    return length + _masked(length) + event + _masked(event)


def unframed(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield each whole and undamaged event, with the offset of its frame's end; stop at the first that is neither."""
    offset = 0
    while offset + 12 <= len(data):
        length = data[offset : offset + 8]
        end = offset + 12 + struct.unpack("<Q", length)[0]
        event = data[offset + 12 : end]
        if end + 4 > len(data) or data[offset + 8 : offset + 12] != _masked(length):
            return
        if data[end : end + 4] != _masked(event):
            return
        yield event, end + 4
        offset = end + 4


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _timed(at: float, step: int = 0) -> bytes:
    encoded_step = b"\x10" + _varint(step) if step else b""
    return b"\x09" + struct.pack("<d", at) + encoded_step


def version_event(at: float) -> bytes:
    """Make the first event of a file."""
    return _timed(at) + _field(3, FILE_VERSION.encode())


def scalar_event(at: float, step: int, tag: str, value: float) -> bytes:
    """Make the event of one value of a series."""
    scalar = _field(1, tag.encode()) + b"\x15" + struct.pack("<f", value)
    return _timed(at, step) + _field(5, _field(1, scalar))


def mark_event(at: float, message: str) -> bytes:
    """Make an event that no series sees: a line in the session's log."""
    return _timed(at) + _field(7, b"\x08" + _varint(CHECKPOINT) + _field(3, message.encode()))


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
