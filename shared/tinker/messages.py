"""The protobuf messages of the Tinker API (``tinker_public.proto`` of SDK 0.38), as far as they are served.

Fields of a message are read and written by number, in protobuf's wire format. Nothing is made from a schema that
arrives: other numbers than those that are read are skipped.
"""

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from flotilla.shared.errors import InvalidRequest

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
MAX_VARINT_BYTES: Final = 10
MAX_FIELDS: Final = 1 << 16
"""Of one message, and numbers of one field: millions of two bytes each would delay the reader."""
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


Array = npt.NDArray[np.float32] | npt.NDArray[np.int64]

FLOAT32, INT64, INT32 = 1, 2, 3
DTYPES: Final[Mapping[int, npt.DTypeLike]] = {FLOAT32: np.float32, INT64: np.int64, INT32: np.int32}
MAX_ELEMENTS: Final = 1 << 23
"""Of all tensors of a request, so that the few bytes of sparse ones do not become gigabytes."""
MISSING: Final = -99999.0
"""Log-probability in an empty cell of a table of the most likely tokens."""
NO_BYTES: Final = memoryview(b"")


@dataclass(frozen=True, slots=True)
class Datum:
    """One sequence to be trained, or to be scored.

    Attributes:
        token_ids: [T] what the model reads.
        inputs: of the loss, by name: float32 or int64, in the shape that was given.
    """

    token_ids: npt.NDArray[np.int64]
    inputs: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class ForwardBackwardRequest:
    """What one call, or one chunk of it, is to compute.

    Attributes:
        model_id, seq_id: which model, and the place among its requests.
        data: sequences, at least one.
        loss: name of the loss.
        config: its parameters.
        is_forward_only: without gradients.
    """

    model_id: str
    seq_id: int
    data: tuple[Datum, ...]
    loss: str
    config: Mapping[str, float | str]
    is_forward_only: bool

    @classmethod
    def read(cls, raw: bytes) -> Self:
        """Read a message.

        Raises:
            InvalidRequest: it is none, holds what is not served (pictures, sound), or more elements than may be.
        """
        head, loss, config, data = Head.read(raw), "", dict[str, float | str](), list[Datum]()
        left = MAX_ELEMENTS
        for number, value in fields_of(memoryview(raw)):
            match number:
                case 3:
                    data.append(_datum(value, left))
                    left -= sum(each.size for each in data[-1].inputs.values())
                case 4:
                    loss = as_text(value)
                case 5:
                    key, content = entry_of(value)
                    config.setdefault(key, as_double(content))
                case 7:
                    key, content = entry_of(value)
                    config[key] = _config_value(content)
        if not data:
            raise InvalidRequest("forward_backward needs at least one datum")
        return cls(head.model_id, head.seq_id, tuple(data), loss, config, head.is_forward_only)


@dataclass(frozen=True, slots=True)
class Head:
    """Whose request a message is, and whether it is forward only; the rest is not read."""

    model_id: str
    seq_id: int
    is_forward_only: bool = False

    @classmethod
    def read(cls, raw: bytes) -> Self:
        """Read the head of a ``ForwardBackwardRequest``.

        Raises:
            InvalidRequest: it is none.
        """
        model_id, seq_id, is_forward_only = "", 0, False
        for number, value in fields_of(memoryview(raw)):
            if number == 1:
                model_id = as_text(value)
            elif number == 2:
                seq_id = as_int(value)
            elif number == 6:
                is_forward_only = bool(as_int(value))
        return cls(model_id, seq_id, is_forward_only)


def _config_value(raw: Value) -> float | str:
    for number, value in fields_of(as_bytes(raw)):
        return as_double(value) if number == 1 else as_text(value)
    return ""


def _datum(raw: Value, most: int) -> Datum:
    tokens, tensors, inputs = list[npt.NDArray[np.int32]](), dict[str, memoryview](), dict[str, Array]()
    for number, value in fields_of(as_bytes(raw)):
        if number == 1:
            tokens.append(_chunk(value))
        elif number == 2:
            name, content = entry_of(value)
            tensors[name] = as_bytes(content)
    count = sum(each.size for each in tokens)
    if not count:
        raise InvalidRequest("a datum has no tokens in model_input")
    for name, content in tensors.items():
        inputs[name] = read_tensor(content, rows=count, most=most)
        most -= inputs[name].size
    return Datum(np.concatenate(tokens).astype(np.int64), inputs)


def _chunk(raw: Value) -> npt.NDArray[np.int32]:
    for number, value in fields_of(as_bytes(raw)):
        if number != 1:
            raise InvalidRequest("model_input may hold encoded text alone: pictures and sound are not served here")
        for inner, content in fields_of(as_bytes(value)):
            if inner == 1:
                return _elements(as_bytes(content), np.int32)
    return np.empty(0, np.int32)


def _elements(raw: memoryview, dtype: npt.DTypeLike) -> npt.NDArray[np.int32]:
    kind = np.dtype(dtype)
    if len(raw) % kind.itemsize:
        raise InvalidRequest(f"a tensor of {kind} has {len(raw)} bytes")
    return np.frombuffer(raw, kind.newbyteorder("<"))


def read_tensor(raw: memoryview, *, rows: int | None = None, most: int = MAX_ELEMENTS) -> Array:
    """Read a ``Tensor``: dense, or sparse (CSR), of which what is not listed is 0.

    Args:
        raw: the message.
        rows: its first dimension; None: any.
        most: how many elements it may have.

    Returns:
        float32 or int64, in its shape.

    Raises:
        InvalidRequest: it does not fit its own shape or the rows, or is too large; nothing was made of it.
    """
    dense, sparse, dtype, shape = NO_BYTES, None, 0, list[int]()
    for number, value in fields_of(raw):
        match number:
            case 1:
                dense = as_bytes(value)
            case 2:
                sparse = as_bytes(value)
            case 3:
                dtype = as_int(value)
            case 4:
                shape += as_ints(value)
    if dtype not in DTYPES:
        raise InvalidRequest(f"a tensor has the dtype {dtype}, which is not read: float32, int64 or int32")
    if not shape and sparse is None:
        shape = [_elements(dense, DTYPES[dtype]).size]
    _check_shape(shape, rows, most)
    if sparse is not None:
        return _from_csr(sparse, dtype, shape)
    found = _elements(dense, DTYPES[dtype])
    if math.prod(shape) != found.size:
        raise InvalidRequest(f"a tensor of shape {shape} has {found.size} elements")
    kept = found.reshape(shape)
    return kept.astype(np.float32) if dtype == FLOAT32 else kept.astype(np.int64)


def _check_shape(shape: Sequence[int], rows: int | None, most: int) -> None:
    if any(size < 0 for size in shape) or math.prod(shape) > most:
        raise InvalidRequest(
            f"a tensor has the shape {shape}: all tensors of a request have at most {MAX_ELEMENTS} elements together"
        )
    if rows is not None and (not shape or shape[0] != rows):
        raise InvalidRequest(f"a tensor has the shape {shape}: it must have a row for each of the {rows} tokens")


def _from_csr(raw: memoryview, dtype: int, shape: Sequence[int]) -> Array:
    values, rows, columns = NO_BYTES, NO_BYTES, NO_BYTES
    for number, value in fields_of(raw):
        match number:
            case 1:
                values = as_bytes(value)
            case 2:
                rows = as_bytes(value)
            case 3:
                columns = as_bytes(value)
    entries, starts, places = (
        _elements(values, DTYPES[dtype]),
        _elements(rows, np.int64),
        _elements(columns, np.int64),
    )
    is_right = len(shape) == 2 and starts.size == shape[0] + 1 and entries.size == places.size
    if not is_right or (np.diff(starts) < 0).any() or int(starts[0]) != 0 or int(starts[-1]) != places.size:
        raise InvalidRequest("a sparse tensor's rows do not fit its shape")
    if places.size and not (int(places.min()) >= 0 and int(places.max()) < shape[1]):
        raise InvalidRequest("a sparse tensor names a column that is not there")
    size = tuple(shape)
    found: Array = np.zeros(size, np.float32) if dtype == FLOAT32 else np.zeros(size, np.int64)
    found[np.repeat(np.arange(shape[0]), np.diff(starts)), places] = entries
    return found


def write_tensor(values: npt.NDArray[np.float32]) -> bytes:
    """Write a ``Tensor`` of float32, dense."""
    return put_bytes(1, values.astype("<f4").tobytes()) + put_int(3, FLOAT32) + put_ints(4, values.shape)


def write_output(outputs: Sequence[Mapping[str, npt.NDArray[np.float32]]], metrics: Mapping[str, float]) -> bytes:
    """Write a ``ForwardBackwardOutput``.

    Args:
        outputs: of each datum, by name; each [T, ...] float32. Of one name all have as many dimensions.
        metrics: sums and counts of the whole request, each named ``name:reduction``.
    """
    # A record per datum: what follows the first dimension may differ among them.
    records = [
        b"".join(put_entry(2, name, put_bytes(2, _batched(each))) for name, each in output.items()) + put_int(3, 1)
        for output in outputs
    ]
    written = put_bytes(1, b"ArrayRecord") + b"".join(put_bytes(2, record) for record in records)
    return written + b"".join(put_entry(3, name, put_double(2, value)) for name, value in metrics.items())


def _batched(values: npt.NDArray[np.float32]) -> bytes:
    raw = values.astype("<f4").tobytes()
    offsets = np.array([0, len(raw)], "<i8").tobytes()
    return put_bytes(1, raw) + put_bytes(2, offsets) + put_int(3, FLOAT32) + put_ints(4, values.shape[1:])


def write_sequence(token_ids: npt.NDArray[np.int32], log_probs: npt.NDArray[np.float32], *, is_cut: bool) -> bytes:
    """Write one ``SampledSequence`` as a field of a ``SampleResponse``."""
    content = put_int(1, int(is_cut)) + put_bytes(2, token_ids.astype("<i4").tobytes())
    return put_bytes(1, content + put_bytes(3, log_probs.astype("<f4").tobytes()))


def write_top(token_ids: npt.NDArray[np.int32], log_probs: npt.NDArray[np.float32]) -> bytes:
    """Write ``TopkLogprobs``: both [T, K], row-major."""
    length, width = token_ids.shape
    tables = put_bytes(1, token_ids.astype("<i4").tobytes()) + put_bytes(2, log_probs.astype("<f4").tobytes())
    return tables + put_int(3, width) + put_int(4, length)
