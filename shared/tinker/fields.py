"""The protobuf wire format, as far as the Tinker API uses it: fields of a message, read and written by number.

Nothing is made from a schema that arrives: ``messages`` says which numbers it reads, and others are skipped.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import Final

from flotilla.shared.errors import InvalidRequest

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
MAX_VARINT_BYTES: Final = 10
MAX_FIELDS: Final = 1 << 16
"""Of one message, and numbers of one field: millions of two bytes each would hold up who reads them."""
MASK: Final = (1 << 64) - 1

Value = int | memoryview


def fields_of(data: memoryview) -> Iterator[tuple[int, Value]]:
    """Yield number and value of each field: an int (varints, unsigned), or the bytes of anything else.

    Raises:
        InvalidRequest: the bytes are no message.
    """
    at, end, count = 0, len(data), 0
    while at < end:
        count += 1
        if count > MAX_FIELDS:
            raise InvalidRequest(f"the protobuf message has more than {MAX_FIELDS} fields")
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind == BYTES:
            length, at = _varint(data, at)
        elif kind in {FIXED64, FIXED32}:
            length = 8 if kind == FIXED64 else 4
        else:
            raise InvalidRequest(f"the protobuf message has a field of the unknown wire type {kind}")
        if number == 0 or length > end - at:
            raise InvalidRequest("the protobuf message is cut off")
        yield number, data[at : at + length]
        at += length


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    found = 0
    for position in range(MAX_VARINT_BYTES):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        found |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            return found & MASK, at
    raise InvalidRequest("the protobuf message is cut off, or holds a number of more than 64 bits")


def as_bytes(value: Value) -> memoryview:
    """Return a field of bytes.

    Raises:
        InvalidRequest: it is a number.
    """
    if isinstance(value, int):
        raise InvalidRequest("the protobuf message has a number where bytes belong")
    return value


def as_int(value: Value) -> int:
    """Return a signed number.

    Raises:
        InvalidRequest: it is of bytes.
    """
    if not isinstance(value, int):
        raise InvalidRequest("the protobuf message has bytes where a number belongs")
    return value - (1 << 64) if value >> 63 else value


def as_text(value: Value) -> str:
    """Return a field of text.

    Raises:
        InvalidRequest: it is none.
    """
    try:
        return bytes(as_bytes(value)).decode()
    except UnicodeDecodeError:
        raise InvalidRequest("the protobuf message has text that is not UTF-8") from None


def as_double(value: Value) -> float:
    """Return a field of 64 bits as a float.

    Raises:
        InvalidRequest: it is none.
    """
    raw = as_bytes(value)
    if len(raw) != 8:
        raise InvalidRequest("the protobuf message has no double where one belongs")
    found: float = struct.unpack("<d", raw)[0]
    return found


def as_ints(value: Value) -> list[int]:
    """Return the numbers of a repeated field: one, or several that are packed."""
    if isinstance(value, int):
        return [as_int(value)]
    found, at = list[int](), 0
    while at < len(value):
        if len(found) == MAX_FIELDS:
            raise InvalidRequest(f"a field of the protobuf message has more than {MAX_FIELDS} numbers")
        number, at = _varint(value, at)
        found.append(as_int(number))
    return found


def entry_of(value: Value) -> tuple[str, Value]:
    """Return key and value of one entry of a map; a missing value is empty bytes."""
    key, content = "", memoryview(b"")
    found: Value = content
    for number, each in fields_of(as_bytes(value)):
        if number == 1:
            key = as_text(each)
        elif number == 2:
            found = each
    return key, found


def varint(value: int) -> bytes:
    """Write a number, not negative."""
    found = bytearray()
    while value > 0x7F:
        found.append((value & 0x7F) | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def put_bytes(number: int, content: bytes) -> bytes:
    """Write a field of bytes, text or a message."""
    return varint(number << 3 | BYTES) + varint(len(content)) + content


def put_int(number: int, value: int) -> bytes:
    """Write a field with a number; 0 is what a missing one means."""
    return varint(number << 3 | VARINT) + varint(value) if value else b""


def put_ints(number: int, values: Sequence[int]) -> bytes:
    """Write a repeated field of numbers, packed."""
    return put_bytes(number, b"".join(map(varint, values))) if values else b""


def put_double(number: int, value: float) -> bytes:
    """Write a field with a double."""
    return varint(number << 3 | FIXED64) + struct.pack("<d", value)


def put_entry(number: int, key: str, value: bytes) -> bytes:
    """Write one entry of a map; ``value`` is a whole field of number 2."""
    return put_bytes(number, put_bytes(1, key.encode()) + value)
