"""The protobuf of the Tinker API: read and written by the declared numbers, and what is wrong is refused."""

from collections.abc import Callable

import numpy as np
import pytest

from flotilla.shared.errors import InvalidRequest
from flotilla.shared.tinker import messages
from flotilla.shared.tinker.messages import (
    MAX_ELEMENTS,
    MAX_FIELDS,
    ForwardBackwardRequest,
    Head,
    as_int,
    as_ints,
    fields_of,
    put_bytes,
    put_double,
    put_entry,
    put_int,
    put_ints,
    read_tensor,
    varint,
    write_output,
    write_tensor,
)

INT64 = 2


def int64(values: list[int], shape: list[int] | None = None) -> bytes:
    raw = put_bytes(1, np.array(values, "<i8").tobytes()) + put_int(3, INT64)
    return raw + put_ints(4, [len(values)] if shape is None else shape)


def a_datum(tokens: list[int]) -> bytes:
    text = put_bytes(1, put_bytes(1, put_bytes(1, np.array(tokens, "<i4").tobytes())))
    return text + put_entry(2, "target_tokens", put_bytes(2, int64(tokens)))


def a_request(data: list[bytes], *more: bytes) -> bytes:
    head = put_bytes(1, b"m:train:0") + put_int(2, 3) + put_bytes(4, b"ppo")
    return head + b"".join(put_bytes(3, each) for each in data) + b"".join(more)


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 2**31, 2**63 - 1])
def test_a_number_is_read_as_it_was_written(value: int) -> None:
    ((number, found),) = fields_of(memoryview(varint(5 << 3) + varint(value)))

    assert (number, as_int(found)) == (5, value)


def test_a_negative_number_has_all_64_bits() -> None:
    ((_, found),) = fields_of(memoryview(b"\x08" + b"\xff" * 9 + b"\x01"))

    assert as_int(found) == -1


def test_a_repeated_number_comes_packed_or_one_by_one() -> None:
    ((_, found),) = fields_of(memoryview(put_ints(4, [3, 400])))

    assert as_ints(found) == [3, 400]
    assert as_ints(7) == [7]


@pytest.mark.parametrize(
    "raw",
    [b"\x08", b"\x0a\x05ab", b"\x0b", b"\x0d\x00", b"\x08" + b"\xff" * 11, b"\x02\x00", b"\x0a\xff\xff\xff\xff\x0f"],
)
def test_what_is_cut_off_or_no_message_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        list(fields_of(memoryview(raw)))


def test_a_request_is_read() -> None:
    config = (
        put_entry(5, "clip_low_threshold", put_double(2, 0.5)),
        put_entry(7, "kind", put_bytes(2, put_bytes(2, b"x"))),
    )

    found = ForwardBackwardRequest.read(a_request([a_datum([5, 6, 7]), a_datum([8])], *config, put_int(6, 1)))

    assert (found.model_id, found.seq_id, found.loss, found.is_forward_only) == ("m:train:0", 3, "ppo", True)
    assert [each.token_ids.tolist() for each in found.data] == [[5, 6, 7], [8]]
    assert found.data[0].inputs["target_tokens"].tolist() == [5, 6, 7]
    assert found.config == {"clip_low_threshold": 0.5, "kind": "x"}


@pytest.mark.parametrize(
    "raw",
    [
        a_request([]),
        a_request([put_entry(2, "target_tokens", put_bytes(2, int64([1])))]),
        a_request([put_bytes(1, put_bytes(2, b"a picture"))]),
        b"\xff\xfe",
    ],
)
def test_a_request_without_tokens_or_with_pictures_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        ForwardBackwardRequest.read(raw)


def test_a_tensor_is_read_in_its_shape() -> None:
    assert read_tensor(memoryview(int64([1, 2, 3, 4], [2, 2]))).tolist() == [[1, 2], [3, 4]]


def test_a_sparse_tensor_is_zero_where_nothing_is_listed() -> None:
    csr = put_bytes(1, np.array([7, 8], "<i8").tobytes()) + put_bytes(2, np.array([0, 1, 1, 2], "<i8").tobytes())
    csr += put_bytes(3, np.array([1, 0], "<i8").tobytes())

    found = read_tensor(memoryview(put_bytes(2, csr) + put_int(3, INT64) + put_ints(4, [3, 2])))

    assert found.tolist() == [[0, 7], [0, 0], [8, 0]]


@pytest.mark.parametrize(
    ("rows", "columns", "shape"),
    [
        ([0, 1], [0], [2, 2]),
        ([0, 2, 1], [0], [2, 2]),
        ([0, 1, 1], [2], [2, 2]),
        ([0, 1, 1], [-1], [2, 2]),
        ([0, 1, 1], [0], [2]),
    ],
)
def test_a_sparse_tensor_that_does_not_fit_its_shape_is_refused(
    rows: list[int], columns: list[int], shape: list[int]
) -> None:
    csr = put_bytes(1, np.array([7], "<i8").tobytes()) + put_bytes(2, np.array(rows, "<i8").tobytes())
    csr += put_bytes(3, np.array(columns, "<i8").tobytes())

    with pytest.raises(InvalidRequest):
        read_tensor(memoryview(put_bytes(2, csr) + put_int(3, INT64) + put_ints(4, shape)))


@pytest.mark.parametrize(
    "raw",
    [
        int64([1, 2], [3]),
        put_bytes(1, b"abc") + put_int(3, INT64),
        put_bytes(1, b"") + put_int(3, 9),
        put_int(3, INT64) + put_bytes(2, b"") + put_ints(4, [1 << 30, 1 << 30]),
    ],
)
def test_a_tensor_of_another_size_or_kind_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read_tensor(memoryview(raw))


def test_an_output_has_a_record_for_each_datum() -> None:
    rows = [{"logprobs": np.array([0.5, 1.5], np.float32)}, {"logprobs": np.array([2.0], np.float32)}]

    found = list(fields_of(memoryview(write_output(rows, {"loss:sum": 3.0}))))

    assert [number for number, _ in found] == [1, 2, 2, 3]


def test_what_is_written_is_read_again() -> None:
    values = np.array([[0.5, 1.5], [2.0, -1.0]], np.float32)

    assert read_tensor(memoryview(write_tensor(values))).tolist() == values.tolist()


@pytest.mark.parametrize("read", [Head.read, lambda raw: read_tensor(memoryview(raw))])
def test_a_message_of_millions_of_fields_is_not_read_to_its_end(read: Callable[[bytes], object]) -> None:
    with pytest.raises(InvalidRequest, match="65536 fields"):
        read(b"\x48\x01" * (MAX_FIELDS + 1))


def test_a_shape_of_millions_of_sizes_is_not_read_to_its_end() -> None:
    with pytest.raises(InvalidRequest, match="65536 numbers"):
        read_tensor(memoryview(put_bytes(4, b"\x01" * (MAX_FIELDS + 1))))


def an_empty_csr(rows: int, columns: int) -> bytes:
    csr = put_bytes(2, np.zeros(rows + 1, "<i8").tobytes())
    return put_bytes(2, csr) + put_int(3, INT64) + put_ints(4, [rows, columns])


def a_sparse_datum(num_tokens: int, tensors: dict[str, bytes]) -> bytes:
    text = put_bytes(1, put_bytes(1, put_bytes(1, np.zeros(num_tokens, "<i4").tobytes())))
    return text + b"".join(put_entry(2, name, put_bytes(2, each)) for name, each in tensors.items())


def test_a_tensor_that_has_no_row_for_each_token_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    request = a_request([a_sparse_datum(2, {"target_tokens": an_empty_csr(1, MAX_ELEMENTS)})])
    made: list[object] = []
    monkeypatch.setattr(np, "zeros", lambda *shape: made.append(shape))

    with pytest.raises(InvalidRequest, match="a row for each of the 2 tokens"):
        ForwardBackwardRequest.read(request)

    assert made == []


@pytest.mark.parametrize("is_one_datum", [True, False])
def test_all_sparse_tensors_of_a_request_together_have_a_bound(
    is_one_datum: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "MAX_ELEMENTS", 64)
    tensor = an_empty_csr(1, 8)
    several = {str(number): tensor for number in range(9)}
    one_each = [a_sparse_datum(1, {name: each}) for name, each in several.items()]

    with pytest.raises(InvalidRequest, match="of a request"):
        ForwardBackwardRequest.read(a_request([a_sparse_datum(1, several)] if is_one_datum else one_each))


def test_sparse_tensors_within_the_bound_are_read() -> None:
    found = ForwardBackwardRequest.read(a_request([a_sparse_datum(2, {"weights": an_empty_csr(2, 3)})] * 2))

    assert [each.inputs["weights"].shape for each in found.data] == [(2, 3)] * 2
