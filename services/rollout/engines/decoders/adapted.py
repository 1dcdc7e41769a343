"""Weights of which an image has the adapters alone: those of the model's files, with B A added where there are some.

What serves is as if whole weights had come: sampling costs nothing more, and whatever computes with weights (native
kernels, CUDA graphs, transformers) needs to know nothing of adapters. The files stay the base, so that no second copy
of it is in memory but what the kernel caches of them.

Rows of one batch may have adapters of their own: each computes with W + scale B A of its own A and B. The base's
weights are there once. What a row computes depends on its own adapter alone, to the last bit.

Source: Hu et al., LoRA, 2021; of many in one batch: Chen et al., Punica, MLSys 2024.
"""

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flotilla.services.rollout.engines.decoders.adapter_files import adapted_weights, check_base, header_in
from flotilla.services.rollout.engines.decoders.architecture import Architecture
from flotilla.services.rollout.engines.decoders.arrival import Arrival, ArrivingTensors, Tensors, damaged
from flotilla.services.rollout.engines.decoders.checkpoint import TensorHeader, TensorSource, open_tensors
from flotilla.services.rollout.engines.decoders.native.kernels import AdapterPointers, AdaptersPointers
from flotilla.shared.errors import WeightTransferFailed
from flotilla.shared.weights.image.adapted import added_to
from flotilla.shared.weights.image.adapters import AdaptersHeader, names_of, weight_of
from flotilla.shared.weights.image.digests import of_tensor
from flotilla.shared.weights.image.quantised import (
    NAMES,
    SCALES,
    Quantisation,
    dequantise,
    read_quantisation,
    scaled_names,
    scales_shape,
)

PLACES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Of a layer, in the order of the kernels."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a weight is in the fused forward.

    Attributes:
        index: among all weights that can be adapted.
        outputs, depth: of the weight.
        first: of the outputs, in the product that it is a part of.
        num_heads: whose halves are interleaved; None: they stay as they are.
    """

    index: int
    outputs: int
    depth: int
    first: int = 0
    num_heads: int | None = None

    def in_order(self, high: Tensor) -> Tensor:
        """Put the outputs of B [out, r] in the order of the fused forward."""
        if self.num_heads is None:
            return high
        return high.view(self.num_heads, 2, -1, high.shape[1]).transpose(1, 2).reshape(high.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """One adapter.

    Attributes:
        pointers: of all places of all layers.
        tensors: that they point to.
    """

    pointers: ctypes.Array[AdapterPointers]
    tensors: Sequence[Tensor]

    @property
    def num_bytes(self) -> int:
        """Count what it takes."""
        return sum(each.nbytes for each in self.tensors)


class RowAdapters:
    """Adapters by name, and which row of a cache computes with which.

    Args:
        sizes: of the model.
        num_rows: of the cache.
        at_once: positions that pass through the model together.
    """

    def __init__(self, sizes: Architecture, num_rows: int, at_once: int) -> None:
        self._places = dict(_places(sizes))
        self._adapters: dict[str, Adapter] = {}
        self._of_row: list[str | None] = [None] * num_rows
        self._rows = (ctypes.c_void_p * num_rows)()
        self._of, self._plus = ((ctypes.c_void_p * at_once)() for _ in range(2))
        self._gates: Tensor | None = None
        self._num_gates = at_once * 2 * sizes.intermediate_size

    @property
    def num_bytes(self) -> int:
        """Count what all of them take."""
        return sum(each.num_bytes for each in self._adapters.values())

    def put(self, name: str, file: Path | None, scale: float) -> None:
        """Read an adapter; rows that compute with the one of this name compute with this one from now on.

        Args:
            name: under which rows are assigned to it.
            file: with A [r, in] and B [out, r] under peft's names; None: of one that adds nothing.
            scale: factor of B A.

        Raises:
            WeightTransferFailed: it cannot be read, or is no adapter of this model.
        """
        nothing = Adapter((AdapterPointers * len(self._places))(), ())
        self._adapters[name] = nothing if file is None else self._read(file, scale)
        self._point([row for row, own in enumerate(self._of_row) if own == name])

    def drop(self, name: str) -> None:
        """Forget an adapter; rows that still have it are without a sample."""
        if self._adapters.pop(name, None) is not None:
            self.assign([row for row, own in enumerate(self._of_row) if own == name], None)

    def clear(self) -> None:
        """Forget all of them."""
        for name in list(self._adapters):
            self.drop(name)

    def assign(self, rows: Sequence[int], name: str | None) -> None:
        """Let rows compute with an adapter from now on; None: with the base alone."""
        for row in rows:
            self._of_row[row] = name
        self._point(rows)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Assign to rows what others have, of which none is a target."""
        for source, target in zip(sources, targets, strict=True):
            self._of_row[target] = self._of_row[source]
        self._point(targets)

    def pointers(self) -> AdaptersPointers | None:
        """Return what the kernels read; None while there are no adapters. Rows may be assigned again meanwhile."""
        if not self._adapters:
            return None
        if self._gates is None:
            self._gates = torch.empty(self._num_gates)
        arrays = (ctypes.addressof(each) for each in (self._rows, self._of, self._plus))
        return AdaptersPointers(*arrays, self._gates.data_ptr())

    def _point(self, rows: Sequence[int]) -> None:
        for row in rows:
            name = self._of_row[row]
            self._rows[row] = None if name is None else ctypes.addressof(self._adapters[name].pointers)

    def _read(self, file: Path, scale: float) -> Adapter:
        found = (AdapterPointers * len(self._places))()
        tensors: list[Tensor] = []
        with open_tensors([file]) as source:
            for weight in _adapted(source.headers, self._places):
                place = self._places[weight]
                # A copy: the file may vanish.
                low, high = (source.read(name).to(torch.float32, copy=True).contiguous() for name in names_of(weight))
                high = (scale * place.in_order(high)).t().contiguous()
                tensors += [low, high]
                found[place.index] = AdapterPointers(
                    low.data_ptr(), high.data_ptr(), low.shape[0], place.first, place.outputs
                )
        return Adapter(found, tensors)


def _places(sizes: Architecture) -> Iterator[tuple[str, Place]]:
    """Name the weights of all layers that can be adapted, as the model's checkpoint does."""
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    queries, keys = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    layer = (
        (queries, hidden, 0, sizes.num_heads),
        (keys, hidden, queries, sizes.num_kv_heads),
        (keys, hidden, queries + keys),
        (hidden, queries),
        (inner, hidden),
        (inner, hidden, inner),
        (hidden, inner),
    )
    for number in range(sizes.num_layers):
        for index, (name, facts) in enumerate(zip(PLACES, layer, strict=True)):
            block = "self_attn" if index < PLACES.index("gate_proj") else "mlp"
            place = Place(number * len(PLACES) + index, *facts)
            yield f"model.layers.{number}.{block}.{name}.weight", place


def _adapted(headers: Mapping[str, TensorHeader], places: Mapping[str, Place]) -> frozenset[str]:
    """Name the weights that have adapters.

    Raises:
        WeightTransferFailed: a name is of no weight that can have one, or A or B is missing or of another shape.
    """
    found = set()
    for name in headers:
        weight = weight_of(name)
        if weight is None or weight not in places:
            raise WeightTransferFailed(f"{name} is no adapter of a linear layer of this model")
        found.add(weight)
    for weight in sorted(found):
        shapes = [headers[name].shape if name in headers else () for name in names_of(weight)]
        place = places[weight]
        rank = shapes[0][0] if shapes[0] else 0
        if shapes != [(rank, place.depth), (place.outputs, rank)]:
            raise WeightTransferFailed(
                f"the adapter of {weight} has the shapes {[list(shape) for shape in shapes]}, and needs "
                f"[r, {place.depth}] and [{place.outputs}, r]"
            )
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class LoadedSum:
    """Digests of a weight to which an adapter was added when an image was loaded.

    Attributes:
        terms: of weight, A and B, as they were read.
        total: of the sum, whose last bits depend on how many threads made it.
    """

    terms: tuple[int, int, int]
    total: int


class BaseWeights:
    """The weights that an engine began with, in its model's files.

    Args:
        files: the safetensors files.
        dtype: that the engine computes in.
        device: that it computes on.

    Attributes:
        loaded: the sums of the image that was loaded last, by the weight's name.
    """

    def __init__(self, files: Sequence[Path], dtype: torch.dtype, device: torch.device) -> None:
        self._files = files
        self.dtype, self.device = dtype, device
        self.loaded: dict[str, LoadedSum] = {}

    def open(self) -> AbstractContextManager[TensorSource]:
        """Open them. Errors as of ``open_tensors``."""
        return open_tensors(self._files)

    def check(self, header: AdaptersHeader) -> None:
        """Check that adapters are for these weights; errors as of ``check_base``."""
        check_base(self._files, header)


class AdaptedTensors:
    """The tensors of a model with adapters added to some: one weight at a time is computed, when it is read.

    Args:
        base: of which the files are open.
        source: of the base's tensors.
        adapters: A and B under peft's names.
        header: their image's metadata.
        loaded: where the digests of sums are kept; None: what is read is not loaded.

    Raises:
        WeightTransferFailed: they are for another base, or for weights that it has not.
    """

    def __init__(
        self,
        base: BaseWeights,
        source: TensorSource,
        adapters: Tensors,
        header: AdaptersHeader,
        loaded: dict[str, LoadedSum] | None = None,
    ) -> None:
        base.check(header)
        self._loaded = loaded
        self._base, self._source, self._adapters, self._header = base, source, adapters, header
        self.headers = source.headers
        shapes = {name: each.shape for name, each in source.headers.items()}
        self._adapted = adapted_weights(adapters.headers, shapes, is_transposed=header.is_transposed)

    def read(self, name: str) -> Tensor:
        """Read a weight, and add what its adapter adds."""
        weight = self._source.read(name)
        if name not in self._adapted:
            return weight
        dtype, device = self._base.dtype, self._base.device
        low, high = (self._adapters.read(each) for each in names_of(name))
        float_low, float_high = (each.to(device, torch.float32) for each in (low, high))
        total = added_to(weight.to(device, dtype), float_low, float_high, self._header)
        if self._loaded is not None:
            self._loaded[name] = LoadedSum(_digests(weight, low, high), of_tensor(total))
        return total

    def digest_of_loaded(self, name: str) -> int | None:
        """Return the digest of a sum as it was loaded; None where there is none, or it was made of other bytes."""
        loaded = self._base.loaded.get(name)
        if name not in self._adapted or loaded is None:
            return None
        terms = _digests(self._source.read(name), *(self._adapters.read(each) for each in names_of(name)))
        return loaded.total if terms == loaded.terms else None


@contextmanager
def open_staged(image: Path, arrival: Arrival | None, base: BaseWeights) -> Iterator[Tensors]:
    """Open an image that is complete, or, with ``arrival``, one that is being received.

    Args:
        image: of whole weights, or of adapters alone.
        arrival: of its bytes; None: it is complete.
        base: that adapters are added to.

    Raises:
        WeightTransferFailed: there is none, the transfer was aborted, or its adapters do not fit the base.
    """
    with ExitStack() as stack:
        whole = stack.enter_context(open_tensors([image])) if arrival is None else ArrivingTensors(image, arrival)
        base.loaded = {}
        yield damaged(_as_served(whole, base, stack, base.loaded))


@contextmanager
def open_whole(image: Path, base: BaseWeights) -> Iterator[Tensors]:
    """Open an image that is complete, and was loaded: its tensors as an engine has them.

    Args:
        image: of whole weights, or of adapters alone.
        base: that adapters are added to.

    Raises:
        WeightTransferFailed: there is none, or its adapters do not fit the base.
    """
    with ExitStack() as stack:
        yield _as_served(stack.enter_context(open_tensors([image])), base, stack)


def _as_served(
    whole: TensorSource | ArrivingTensors,
    base: BaseWeights,
    stack: ExitStack,
    loaded: dict[str, LoadedSum] | None = None,
) -> Tensors:
    header = header_in(whole.metadata)
    if header is not None:
        return AdaptedTensors(base, stack.enter_context(base.open()), whole, header, loaded)
    return whole if _quantisation(whole.metadata) is None else DequantisedTensors(whole, base.device)


class DequantisedTensors:
    """The weights of an image whose matrices have 8 bits an element: each is multiplied by its scales when it is read.

    Args:
        source: numbers and scales.
        device: that multiplies.

    Raises:
        WeightTransferFailed: scales do not fit their weight.
    """

    def __init__(self, source: Tensors, device: torch.device) -> None:
        self._source, self._scaled, self._device = source, scaled_names(source.headers), device
        self.headers = {
            name: TensorHeader("F32", header.shape) if name in self._scaled else header
            for name, header in source.headers.items()
            if name in self._scaled or name.removesuffix(SCALES) not in self._scaled
        }
        for name in self._scaled:
            weight, scales = source.headers[name], source.headers[name + SCALES]
            expected = {scales_shape(weight.shape, how) for how, dtype in NAMES.items() if dtype == weight.dtype}
            if len(weight.shape) != 2 or scales.dtype != "F32" or tuple(scales.shape) not in expected:
                raise WeightTransferFailed(
                    f"{name} is {weight.dtype} of shape {list(weight.shape)}, and its scales are {scales.dtype} of "
                    f"shape {list(scales.shape)}, which do not fit"
                )

    def read(self, name: str) -> Tensor:
        """Read a weight, float32 where it was quantised."""
        numbers = self._source.read(name)
        if name not in self._scaled:
            return numbers
        # Numbers travel to the device, in a quarter of the bytes of what they are multiplied out to.
        return dequantise(numbers.to(self._device), self._source.read(name + SCALES).to(self._device))


def _digests(weight: Tensor, low: Tensor, high: Tensor) -> tuple[int, int, int]:
    return of_tensor(weight), of_tensor(low), of_tensor(high)


def _quantisation(metadata: Mapping[str, str]) -> Quantisation | None:
    try:
        return read_quantisation(metadata)
    except ValueError as error:
        raise WeightTransferFailed(f"the image cannot be read: {error}") from error
