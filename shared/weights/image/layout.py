"""Where each tensor lies in a weight image: the safetensors header, written and read without torch.

A safetensors file is an 8-byte little-endian header length, a JSON header, then the tensors' bytes without gaps. Gaps
are not allowed between tensors, but the header may end in spaces: it is padded so that the data starts on a multiple of
64 bytes, and tensors are ordered by falling element size, so that each one is aligned to its own element.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Self

from flotilla.shared.errors import WeightTransferFailed
from flotilla.shared.schemas.publication import TensorSpec

DATA_ALIGNMENT_BYTES = 64
MAX_HEADER_BYTES = 100_000_000
"""The safetensors reader refuses longer headers."""

ELEMENT_BYTES: Mapping[str, int] = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}
"""Size of one element of each safetensors dtype that an image may hold."""

LENGTH_BYTES = 8
"""Of the number that an image begins with: how long its JSON header is."""
_METADATA = "__metadata__"


@dataclass(frozen=True)
class ImageLayout:
    """The header of an image and the place of every tensor in it, in the order of their bytes."""

    header: bytes
    """Length, JSON and padding: the image's first bytes, as they are."""
    tensors: tuple[TensorSpec, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)
    """The header's entries beside the tensors."""

    @classmethod
    def of(cls, tensors: Mapping[str, tuple[Sequence[int], str]], metadata: Mapping[str, str] | None = None) -> Self:
        """Lay out tensors given by name as (shape, safetensors dtype).

        Tensors of one dtype lie next to each other in the order given, so a flat buffer of them is copied in one piece.

        Args:
            tensors: what the image holds.
            metadata: the header's other entries; the checksum covers them.

        Raises:
            ValueError: no tensors, a reserved name, a negative dimension or a dtype that images do not hold.
        """
        _check(tensors)
        names = sorted(tensors, key=lambda name: (-ELEMENT_BYTES[tensors[name][1]], tensors[name][1]))
        offsets = [0]
        for name in names:
            shape, dtype = tensors[name]
            offsets.append(offsets[-1] + math.prod(shape) * ELEMENT_BYTES[dtype])
        header = _encode(
            {
                name: {"dtype": tensors[name][1], "shape": list(tensors[name][0]), "data_offsets": [start, end]}
                for name, (start, end) in zip(names, pairwise(offsets), strict=True)
            },
            metadata or {},
        )
        specs = tuple(
            TensorSpec(
                name=name,
                shape=tuple(tensors[name][0]),
                dtype=tensors[name][1],
                start=len(header) + start,
                end=len(header) + end,
            )
            for name, (start, end) in zip(names, pairwise(offsets), strict=True)
        )
        return cls(header, specs, dict(metadata or {}))

    @classmethod
    def parse(cls, image: bytes | memoryview) -> Self:
        """Read the layout from an image's first bytes.

        Raises:
            WeightTransferFailed: the bytes do not begin a safetensors file that an image may be.
        """
        view = memoryview(image).cast("B")
        try:
            length = int.from_bytes(view[:LENGTH_BYTES], "little")
            if not 0 < length <= min(MAX_HEADER_BYTES, len(view) - LENGTH_BYTES):
                raise ValueError(f"header length {length} of {len(view)} bytes")
            header = bytes(view[: LENGTH_BYTES + length])
            entries = json.loads(header[LENGTH_BYTES:])
            if not isinstance(entries, dict):
                raise TypeError("the header is no object")
            metadata = {key: str(value) for key, value in entries.pop(_METADATA, {}).items() if key != "format"}
            specs = [_spec(name, entry, len(header)) for name, entry in entries.items()]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise WeightTransferFailed(f"not a weight image: {error}") from error
        specs.sort(key=lambda spec: (spec.start, spec.end))
        for before, after in pairwise(specs):
            if before.end != after.start:
                raise WeightTransferFailed(f"not a weight image: {after.name} does not follow {before.name}")
        if specs and specs[0].start != len(header):
            raise WeightTransferFailed(f"not a weight image: {specs[0].name} does not follow the header")
        return cls(header, tuple(specs), metadata)

    @property
    def image_bytes(self) -> int:
        """Size of the whole image."""
        return self.tensors[-1].end if self.tensors else len(self.header)


def header_bytes(image: bytes) -> int:
    """Return how many bytes go before the first tensor, by an image's first ``LENGTH_BYTES``."""
    return LENGTH_BYTES + int.from_bytes(image[:LENGTH_BYTES], "little")


def read_layout(image: Path) -> ImageLayout:
    """Read where each tensor lies in a safetensors file.

    Raises:
        WeightTransferFailed: it is none.
    """
    try:
        with image.open("rb") as file:
            start = file.read(LENGTH_BYTES)
            return ImageLayout.parse(start + file.read(header_bytes(start) - len(start)))
    except OSError as error:
        raise WeightTransferFailed(f"cannot open the weight image: {error}") from error


def _check(tensors: Mapping[str, tuple[Sequence[int], str]]) -> None:
    if not tensors:
        raise ValueError("an image needs at least one tensor")
    for name, (shape, dtype) in tensors.items():
        if name == _METADATA:
            raise ValueError(f"{_METADATA} is reserved by the format")
        if dtype not in ELEMENT_BYTES:
            raise ValueError(f"{name} has dtype {dtype}; images hold {', '.join(ELEMENT_BYTES)}")
        if any(dimension < 0 for dimension in shape):
            raise ValueError(f"{name} has a negative dimension: {tuple(shape)}")


def _encode(entries: Mapping[str, object], metadata: Mapping[str, str]) -> bytes:
    # transformers refuses a file whose metadata do not name the framework that its shapes are for.
    said = {"format": "pt"} | dict(metadata)
    text = json.dumps({_METADATA: said} | dict(entries), separators=(",", ":")).encode()
    padding = -(LENGTH_BYTES + len(text)) % DATA_ALIGNMENT_BYTES
    length = len(text) + padding
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"the header would take {length} bytes, the format allows {MAX_HEADER_BYTES}")
    return length.to_bytes(LENGTH_BYTES, "little") + text + b" " * padding


def _spec(name: str, entry: Mapping[str, object], header_bytes: int) -> TensorSpec:
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not (isinstance(dtype, str) and isinstance(shape, list) and isinstance(offsets, list)):
        raise TypeError(f"malformed entry of {name}")
    start, end = offsets
    if end - start != math.prod(shape) * ELEMENT_BYTES[dtype]:
        raise ValueError(f"{name} has {end - start} bytes, which does not fit its shape {shape} and dtype {dtype}")
    return TensorSpec(name=name, shape=tuple(shape), dtype=dtype, start=header_bytes + start, end=header_bytes + end)
