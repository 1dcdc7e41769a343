"""Weights of which an image has the adapters alone: those of the model's files, with B A added where there are some.

What serves is as if whole weights had come: sampling costs nothing more, and whatever computes with weights (native
kernels, CUDA graphs, transformers) needs to know nothing of adapters. The files stay the base, so that no second copy
of it is in memory but what the kernel caches of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flotilla.services.rollout.engines.decoders.adapter_files import adapted_weights, check_base, header_in
from flotilla.services.rollout.engines.decoders.arrival import Arrival, ArrivingTensors, Tensors, damaged
from flotilla.services.rollout.engines.decoders.checkpoint import TensorHeader, TensorSource, open_tensors
from flotilla.shared.errors import WeightTransferFailed
from flotilla.shared.weights.image.adapted import added_to
from flotilla.shared.weights.image.adapters import AdaptersHeader, names_of
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
        header: what their image says of them.
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
    return whole if _quantisation(whole.metadata) is None else DequantisedTensors(whole)


class DequantisedTensors:
    """The weights of an image whose matrices have 8 bits an element: each is multiplied by its scales when it is read.

    Args:
        source: numbers and scales.

    Raises:
        WeightTransferFailed: scales do not fit their weight.
    """

    def __init__(self, source: Tensors) -> None:
        self._source, self._scaled = source, scaled_names(source.headers)
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
        return dequantise(numbers, self._source.read(name + SCALES)) if name in self._scaled else numbers


def _digests(weight: Tensor, low: Tensor, high: Tensor) -> tuple[int, int, int]:
    return of_tensor(weight), of_tensor(low), of_tensor(high)


def _quantisation(metadata: Mapping[str, str]) -> Quantisation | None:
    try:
        return read_quantisation(metadata)
    except ValueError as error:
        raise WeightTransferFailed(f"the image cannot be read: {error}") from error
