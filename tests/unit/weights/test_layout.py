"""The header of a weight image."""

import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla.shared.errors import WeightTransferFailed
from flotilla.shared.weights.image.layout import DATA_ALIGNMENT_BYTES, ELEMENT_BYTES, ImageLayout

_SHAPES = st.lists(st.integers(0, 5), max_size=3)
_TENSORS = st.dictionaries(
    st.text(min_size=1, max_size=8), st.tuples(_SHAPES, st.sampled_from(sorted(ELEMENT_BYTES))), min_size=1, max_size=6
)


@given(_TENSORS)
@settings(max_examples=25)
def test_tensors_follow_each_other_without_gaps_and_are_aligned(tensors: dict[str, tuple[list[int], str]]) -> None:
    layout = ImageLayout.of(tensors)

    assert len(layout.header) % DATA_ALIGNMENT_BYTES == 0
    assert layout.tensors[0].start == len(layout.header)
    assert [spec.end for spec in layout.tensors[:-1]] == [spec.start for spec in layout.tensors[1:]]
    assert all(spec.start % ELEMENT_BYTES[spec.dtype] == 0 for spec in layout.tensors)
    assert {spec.name: (list(spec.shape), spec.dtype) for spec in layout.tensors} == tensors


@given(_TENSORS)
@settings(max_examples=25)
def test_a_header_is_read_as_it_was_written(tensors: dict[str, tuple[list[int], str]]) -> None:
    layout = ImageLayout.of(tensors)

    parsed = ImageLayout.parse(layout.header)

    assert parsed.header == layout.header
    assert parsed.image_bytes == layout.image_bytes
    assert {spec.name: spec for spec in parsed.tensors} == {spec.name: spec for spec in layout.tensors}


def test_tensors_of_one_dtype_keep_the_order_given() -> None:
    layout = ImageLayout.of({"z": ((2,), "BF16"), "b": ((2,), "F32"), "y": ((2,), "BF16"), "a": ((2,), "F32")})

    assert [spec.name for spec in layout.tensors] == ["b", "a", "z", "y"]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "at least one"),
        ({"__metadata__": ((1,), "F32")}, "reserved"),
        ({"a": ((1,), "F4")}, "dtype F4"),
        ({"a": ((-1,), "F32")}, "negative"),
    ],
)
def test_what_the_format_cannot_hold_is_refused(tensors: dict[str, tuple[tuple[int, ...], str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageLayout.of(tensors)


def _header(entries: object) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "image",
    [
        b"",
        b"\0" * 8,
        struct.pack("<Q", 1 << 40) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2) + b"\xff\xff",
        _header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}),
        _header({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}),
        _header({"a": {"dtype": "F32", "shape": [1]}}),
        _header({"a": {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}}),
        _header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}),
        _header(
            {
                "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
                "b": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]},
            }
        ),
    ],
)
def test_bytes_that_are_no_image_are_refused(image: bytes) -> None:
    with pytest.raises(WeightTransferFailed, match="not a weight image"):
        ImageLayout.parse(image)
