"""Images whose matrices have 8 bits an element: numbers beside scales, which a reader multiplies when it loads them.

``int8``: whole numbers from -127 to 127, and a scale for each row (output channel). ``fp8``: floating-point numbers
with 4 bits of exponent and 3 of fraction (E4M3, at most 448), and a scale for each block of 128 x 128. A scale is the
largest magnitude of its row or block over the largest number, so nothing is cut. What is no matrix travels as it is.

Source: DeepSeek-V3 Technical Report, 3.3.2 (blocks of weights); its checkpoints' name for scales, ``_scale_inv``.
"""

import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Final, Literal

import torch
from torch import Tensor
from torch.nn import functional

from flotilla.shared.schemas.publication import TensorSpec
from flotilla.shared.weights.image.layout import ImageLayout

Quantisation = Literal["int8", "fp8"]

QUANTISATION: Final = "quantisation"
"""The header's entry for quantisation: how its matrices are quantised."""
SCALES: Final = "_scale_inv"
"""Behind a weight's name: its scales, float32."""
BLOCK: Final = 128
PIECE: Final = (1 << 24, 1 << 18)
"""Numbers that are multiplied at a time: by a GPU, and by a CPU, whose caches hold them."""
LARGEST: Final[Mapping[str, float]] = {"int8": 127.0, "fp8": 448.0}
DTYPES: Final[Mapping[str, torch.dtype]] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
NAMES: Final[Mapping[Quantisation, str]] = {"int8": "I8", "fp8": "F8_E4M3"}
FLOATS: Final = frozenset({"F32", "F16", "BF16"})


def is_quantised(shape: tuple[int, ...], dtype: str) -> bool:
    """Whether a weight is a matrix of floating-point numbers, which is what is quantised."""
    return len(shape) == 2 and dtype in FLOATS and math.prod(shape) > 0


def scales_shape(shape: tuple[int, ...], how: Quantisation) -> tuple[int, int]:
    """Return the shape of the scales of a matrix [out, in]."""
    if how == "int8":
        return shape[0], 1
    return -(-shape[0] // BLOCK), -(-shape[1] // BLOCK)


def layout_of_quantised(whole: ImageLayout, how: Quantisation) -> ImageLayout:
    """Lay out an image for the same weights, quantised."""
    tensors: dict[str, tuple[tuple[int, ...], str]] = {}
    for spec in whole.tensors:
        shape = tuple(spec.shape)
        if is_quantised(shape, spec.dtype):
            tensors[spec.name] = shape, NAMES[how]
            tensors[spec.name + SCALES] = scales_shape(shape, how), "F32"
        else:
            tensors[spec.name] = shape, spec.dtype
    return ImageLayout.of(tensors, {**whole.metadata, QUANTISATION: how})


def read_quantisation(metadata: Mapping[str, str]) -> Quantisation | None:
    """Read how an image is quantised; None where it is not.

    Raises:
        ValueError: in a way that this release does not know.
    """
    found = metadata.get(QUANTISATION)
    if found is None:
        return None
    for how in NAMES:
        if how == found:
            return how
    raise ValueError(f"its weights are quantised as {found!r}, which is neither int8 nor fp8")


def quantise(weight: Tensor, how: Quantisation) -> tuple[Tensor, Tensor]:
    """Quantise a matrix [out, in], computed in float32; not finite numbers stay what a scale cannot hide.

    Returns:
        The numbers [out, in], and their scales as of ``scales_shape``, float32.
    """
    whole, most = weight.float(), LARGEST[how]
    # A row or block of zeros has any scale.
    if how == "int8":
        scales = whole.abs().amax(1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny) / most
        return (whole / scales).round_().clamp_(-most, most).to(torch.int8), scales
    rows, columns = scales_shape(tuple(weight.shape), how)
    missing = (0, columns * BLOCK - weight.shape[1], 0, rows * BLOCK - weight.shape[0])
    blocks = functional.pad(whole.abs(), missing).view(rows, BLOCK, columns, BLOCK)
    scales = blocks.amax((1, 3)).clamp_(min=torch.finfo(torch.float32).tiny) / most
    return (whole / _spread(scales, weight.shape)).clamp_(-most, most).to(DTYPES[how]), scales


def dequantise(numbers: Tensor, scales: Tensor) -> Tensor:
    """Multiply numbers [out, in] by their scales: float32. The same bits wherever it is computed.

    Piece by piece: beside the result no second matrix is made of floats.
    """
    rows, columns = numbers.shape
    is_by_row = numbers.dtype == torch.int8 and scales.shape == (rows, 1)
    height = 1 if is_by_row else BLOCK
    found = torch.empty(numbers.shape, device=numbers.device)
    for start, end in _pieces(rows, height, max(1, PIECE[numbers.device.type == "cpu"] // (height * columns))):
        factors = scales[start // height : -(-end // height)]
        if not is_by_row:
            factors = factors.repeat_interleave(BLOCK, 1)[:, :columns]
        shape = (len(factors), -1, columns)
        whole = _as_floats(numbers[start:end]).view(shape)
        torch.mul(whole, factors.unsqueeze(1), out=found[start:end].view(shape))
    return found


def _pieces(rows: int, height: int, at_once: int) -> Iterator[tuple[int, int]]:
    """Cut rows into runs of so many blocks of a height; what is left of a last block is a run of its own."""
    whole = rows - rows % height
    for start in range(0, whole, at_once * height):
        yield start, min(start + at_once * height, whole)
    if whole < rows:
        yield whole, rows


def _as_floats(numbers: Tensor) -> Tensor:
    """Convert numbers to float32; on a CPU those of E4M3 by a table, in less than half the time that torch takes."""
    if numbers.device.type != "cpu" or numbers.dtype != torch.float8_e4m3fn:
        return numbers.float()
    return _table().index_select(0, numbers.view(torch.uint8).flatten().int())


@cache
def _table() -> Tensor:
    """Return what each byte stands for: [256] float32."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def _spread(scales: Tensor, shape: torch.Size) -> Tensor:
    """Repeat the scales of blocks for each of their elements: [out, in]."""
    spread = scales.repeat_interleave(BLOCK, 0)[: shape[0]]
    return spread.repeat_interleave(BLOCK, 1)[:, : shape[1]]


class Dequantised(Mapping[str, Tensor]):
    """The weights of an image by name, as a reader has them; one at a time is computed, when it is asked for.

    Args:
        tensors: all of the image's.
        how: it is quantised; None: it is not.
    """

    def __init__(self, tensors: Mapping[str, Tensor], how: Quantisation | None) -> None:
        self._tensors, self._scaled = tensors, set() if how is None else scaled_names(tensors)

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        return dequantise(tensor, self._tensors[name + SCALES]) if name in self._scaled else tensor

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._tensors if name.removesuffix(SCALES) not in self._scaled or name in self._scaled)

    def __len__(self) -> int:
        return len(self._tensors) - len(self._scaled)


def scaled_names(names: Mapping[str, object]) -> set[str]:
    """Name the weights that have scales."""
    return {name.removesuffix(SCALES) for name in names if name.endswith(SCALES) and name.removesuffix(SCALES) in names}


def quantised_specs(layout: ImageLayout) -> Iterator[tuple[TensorSpec, TensorSpec | None]]:
    """List an image's weights, each with its scales, if it has some."""
    specs = {spec.name: spec for spec in layout.tensors}
    scaled = scaled_names(specs)
    for name, spec in specs.items():
        if name in scaled:
            yield spec, specs[name + SCALES]
        elif name.removesuffix(SCALES) not in scaled:
            yield spec, None
