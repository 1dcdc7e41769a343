"""Whether an image of adapters alone fits a base, by their headers: names, shapes and the base's checksum, no torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from flotilla.services.rollout.engines.decoders.checkpoint import TensorHeader
from flotilla.shared.errors import ModelError, WeightTransferFailed
from flotilla.shared.models.weight_files import checksum_of
from flotilla.shared.weights.image.adapters import AdaptersHeader, names_of, weight_of


def header_in(metadata: Mapping[str, str]) -> AdaptersHeader | None:
    """Read an image's metadata of adapters; None if it holds whole weights.

    Raises:
        WeightTransferFailed: it is malformed.
    """
    try:
        return AdaptersHeader.read(metadata)
    except ValueError as error:
        raise WeightTransferFailed(f"not an image of adapters: {error}") from error


def check_base(files: Sequence[Path], header: AdaptersHeader) -> None:
    """Check that adapters are for the weights in some files; these are read once for it.

    Raises:
        WeightTransferFailed: they are not.
    """
    try:
        found = checksum_of(files)
    except ModelError as error:
        raise WeightTransferFailed(error.detail) from error
    if found != header.base:
        raise WeightTransferFailed(
            f"the adapters are for a base with checksum {header.base}, and the model's files here have {found}: "
            "trainer and rollouts need the same model.path, or set asynchrony.publication.lora to merged"
        )


def adapted_weights(
    adapters: Mapping[str, TensorHeader], weights: Mapping[str, tuple[int, ...]], *, is_transposed: bool
) -> frozenset[str]:
    """Name the weights that have adapters.

    Args:
        adapters: the image's tensors.
        weights: shapes of those of the base.
        is_transposed: whether these are [in, out].

    Raises:
        WeightTransferFailed: names or shapes are not those of pairs for the weights.
    """
    found = set()
    for name in adapters:
        weight = weight_of(name)
        if weight is None or weight not in weights:
            raise WeightTransferFailed(f"{name} is no adapter of a weight in the model's files")
        found.add(weight)
    for weight in found:
        low, high = names_of(weight)
        if low not in adapters or high not in adapters:
            raise WeightTransferFailed(f"the adapter of {weight} lacks A or B")
        if not _fits(adapters[low].shape, adapters[high].shape, weights[weight], is_transposed=is_transposed):
            raise WeightTransferFailed(
                f"the adapter of {weight} has shapes {list(adapters[low].shape)} and {list(adapters[high].shape)}, "
                f"which do not fit {list(weights[weight])}"
            )
    return frozenset(found)


def _fits(low: tuple[int, ...], high: tuple[int, ...], weight: tuple[int, ...], *, is_transposed: bool) -> bool:
    if len(low) != 2 or len(high) != 2 or low[0] != high[1]:
        return False
    out, wide = high[0], low[1]
    return weight == ((wide, out) if is_transposed else (out, wide))
