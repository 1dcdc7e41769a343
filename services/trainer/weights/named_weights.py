"""What a module's weights are called in its checkpoint, and where each of them lies in an image."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flotilla.shared.weights.image.checkpoint_names import pieces_of
from flotilla.shared.weights.image.layout import ImageLayout
from flotilla.shared.weights.image.tensors import on_wire, safetensors_name


class Packed(Protocol):
    """One of them."""

    @property
    def shape(self) -> torch.Size:
        """Of the weight as it is published."""

    @property
    def dtype(self) -> torch.dtype:
        """Likewise."""

    def unpacked(self) -> Tensor:
        """Make the weight, again each time."""


NONE_PACKED: Mapping[str, Packed] = MappingProxyType({})


@dataclass(frozen=True)
class Label:
    """An image's metadata for weights whose names differ from the checkpoint's.

    Attributes:
        names: from what they would be called there to what they are called in the image.
        metadata: the image's other header entries.
    """

    names: Mapping[str, str]
    metadata: Mapping[str, str]


@dataclass(frozen=True, eq=False)
class NamedWeights:
    """The parameters of a module, each once, and the image that they make.

    Attributes:
        groups: by the name of the module that the checkpoint keeps, all parameters that are this memory.
        by_dtype: those names, by dtype in memory, in the module's order.
        first: by dtype in memory, the checkpoint's tensor that its run of bytes in the image begins with.
        layout: of the image; weights of one dtype in memory follow one another there in the order of ``by_dtype``.
    """

    groups: Mapping[str, list[nn.Parameter]]
    by_dtype: Mapping[torch.dtype, list[str]]
    first: Mapping[torch.dtype, str]
    layout: ImageLayout

    @classmethod
    def of(
        cls,
        module: nn.Module,
        wire_dtype: torch.dtype | None,
        names: Collection[str] | None = None,
        packed: Mapping[str, Packed] = NONE_PACKED,
        label: Label | None = None,
    ) -> Self:
        """Find them, and lay out an image in ``wire_dtype`` (None keeps each dtype).

        Args:
            module: with at least one parameter.
            wire_dtype: of floating-point weights in the image.
            names: paths of the parameters that are meant; None for all.
            packed: further weights, by the paths that they would have as parameters; among the groups they are
                parameters on ``meta``.
            label: of the image; None gives the weights the checkpoint's names.

        Raises:
            ValueError: there is none.
        """
        groups = {name: tied for name, tied in distinct(module).items() if names is None or name in names}
        if packed:
            empty = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in packed.items()}
            groups |= {name: [nn.Parameter(each, requires_grad=False)] for name, each in empty.items()}
            groups = {name: groups[name] for name in _paths(module, packed) if name in groups}
        if not groups:
            raise ValueError("the module has no parameters")
        by_dtype: dict[torch.dtype, list[str]] = defaultdict(list)
        for name, tied in groups.items():
            by_dtype[tied[0].dtype].append(name)
        pieces = {
            dtype: pieces_of(module, {name: tuple(groups[name][0].shape) for name in names})
            for dtype, names in by_dtype.items()
        }
        named = str if label is None else label.names.__getitem__
        layout = ImageLayout.of(
            {
                named(piece.name): (piece.shape, safetensors_name(on_wire(dtype, wire_dtype)))
                for dtype, of_dtype in pieces.items()
                for piece in of_dtype
            },
            None if label is None else label.metadata,
        )
        return cls(groups, by_dtype, {dtype: named(of_dtype[0].name) for dtype, of_dtype in pieces.items()}, layout)


def distinct(module: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Group parameters that are one memory under the name that the checkpoint gives it, in the module's order."""
    dropped = _dropped_names(module)
    names: dict[object, str] = {}
    groups: dict[str, list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        key = _memory(parameter)
        if key not in names:
            names[key] = name
            groups[name] = [parameter]
            continue
        kept = names[key]
        if all(parameter is not other for other in groups[kept]):
            groups[kept].append(parameter)
        if kept in dropped and name not in dropped:
            names[key] = name
            groups[name] = groups.pop(kept)
    return groups


def _paths(module: nn.Module, packed: Collection[str]) -> Iterator[str]:
    """Go through the paths of a module's weights, packed ones where they would be as parameters."""
    for path, each in module.named_modules():
        prefix = f"{path}." if path else ""
        if f"{prefix}weight" in packed:
            yield f"{prefix}weight"
        for name, _ in each.named_parameters(recurse=False):
            yield prefix + name


def _memory(parameter: nn.Parameter) -> object:
    if isinstance(parameter, DTensor) or parameter.device.type == "meta" or parameter.numel() == 0:
        return id(parameter)
    return (parameter.data_ptr(), parameter.dtype, tuple(parameter.shape), parameter.stride())


def _dropped_names(module: nn.Module) -> frozenset[str]:
    """Name the tied weights that transformers leaves out of a checkpoint."""
    tied: Mapping[str, str] | None = getattr(module, "all_tied_weights_keys", None)
    return frozenset(tied or ())
