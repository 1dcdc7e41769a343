"""TensorBoard's event files, as far as scalars need them: records with two checksums around a small protocol buffer.

Written here because the package that would do it imports torch where it finds it, and a gateway has no use for torch.

Source: TensorFlow, ``record_writer`` (framing) and ``event.proto`` (field numbers).
"""

import struct
from collections.abc import Iterator

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
