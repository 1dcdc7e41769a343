"""A module's parameters where several ranks hold a part of each: named and laid out as one rank's are.

Every rank writes its own elements straight into the image, at their places: no rank ever has the whole of a weight.

Weights of which some are packed are written one by one. Where all of them are parameters, ``FlatParameters`` copies
them in one go; but weights that are packed cannot lie in flat buffers as they are published, and all of them unpacked
would be what packing saves.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from flotilla.services.trainer.weights.named_weights import NONE_PACKED, Label, NamedWeights, Packed
from flotilla.services.trainer.weights.parts import Increment, Part, index_of, local_of, part_of, write_parts
from flotilla.shared.weights.image.image import WeightImage
from flotilla.shared.weights.image.layout import ImageLayout
from flotilla.shared.weights.image.tensors import on_wire


class ShardedParameters:
    """Views of what this rank has of each parameter.

    Args:
        module: its parameters are DTensors, or whole and the same on every rank.
        is_leader: whether this rank writes what is not sharded.
        wire_dtype: floating-point dtype that images are cast to; None keeps each dtype.
        names: paths of the parameters that are meant; None for all.
        increment: what is added to weights in images, and only there; every rank asks alike. None for nothing.
        packed: weights of images, and only of them, that are no parameters; whole on every rank.
        label: of images; None gives the weights the checkpoint's names.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        is_leader: bool,
        wire_dtype: torch.dtype | None = None,
        names: Collection[str] | None = None,
        increment: Increment | None = None,
        packed: Mapping[str, Packed] = NONE_PACKED,
        label: Label | None = None,
    ) -> None:
        self._named = NamedWeights.of(module, wire_dtype, names, packed, label)
        self._packed = packed
        self._is_leader, self._wire_dtype = is_leader, wire_dtype
        self._increment = increment

    @property
    def layout(self) -> ImageLayout:
        """Of the image."""
        return self._named.layout

    @property
    def _parameters(self) -> dict[str, Tensor]:
        return {name: tied[0] for name, tied in self._named.groups.items()}

    @torch.no_grad()
    def copies(self, *, as_published: bool) -> dict[str, Tensor]:
        """Copy this rank's elements: as they are, or as receivers have them after a publication."""
        dtype = self._wire_dtype if as_published else None
        return {
            name: local_of(parameter).to(on_wire(parameter.dtype, dtype), copy=True).to(parameter.dtype)
            for name, parameter in self._parameters.items()
        }

    @torch.no_grad()
    def fill(self, copies: Mapping[str, Tensor]) -> None:
        """Put this rank's elements back, in place."""
        for name, parameter in self._parameters.items():
            local_of(parameter).copy_(copies[name])

    def image_parts(self) -> Iterator[Part]:
        """Go through this rank's parts of the image; what is unpacked, or added to, lasts until the next."""
        for name, part in zip(self._ordered(), self._parts(self._parameters, self._named.first), strict=True):
            parameter = self._parameters[name]
            if name in self._packed and part.values.numel():
                part = replace(part, values=self._packed[name].unpacked())  # noqa: PLW2901 (the same part, with values)
            added = None if self._increment is None else self._increment(name, index_of(parameter))
            if added is None or part.values.numel() == 0:
                yield part
            else:
                yield replace(part, values=part.values.float() + added)

    def run_parts(self, copies: Mapping[str, Tensor], prefix: str) -> list[Part]:
        """Return this rank's parts of copies that lie as one run of elements per dtype, named by prefix and dtype."""
        names = {dtype: f"{prefix}/{str(dtype).removeprefix('torch.')}" for dtype in self._named.by_dtype}
        parts = zip(self._ordered(), self._parts(self._parameters, names), strict=True)
        return [replace(part, values=copies[name]) if part.values.numel() else part for name, part in parts]

    def run_lengths(self) -> dict[torch.dtype, int]:
        """Count the elements of all ranks, by dtype."""
        parameters = self._parameters
        return {dtype: sum(parameters[name].numel() for name in names) for dtype, names in self._named.by_dtype.items()}

    def from_runs(self, runs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Cut this rank's elements out of runs as ``run_parts`` lays them out."""
        found = {}
        parts = self._parts(self._parameters, self._named.first)
        for name, part in zip(self._ordered(), parts, strict=True):
            run = runs[str(self._parameters[name].dtype).removeprefix("torch.")]
            region = run[part.start : part.start + math.prod(part.shape)].view(part.shape)
            found[name] = region[part.index].to(local_of(self._parameters[name]).device).clone()
        return found

    def _ordered(self) -> list[str]:
        return [name for names in self._named.by_dtype.values() for name in names]

    def _parts(self, tensors: Mapping[str, Tensor], first: Mapping[torch.dtype, str]) -> list[Part]:
        parts = []
        for dtype, names in self._named.by_dtype.items():
            start = 0
            for name in names:
                parts.append(part_of(tensors[name], first[dtype], is_leader=self._is_leader, start=start))
                start += tensors[name].numel()
        return parts


class StreamedParameters(ShardedParameters):
    """Those of one process. Arguments as of ``ShardedParameters``; one weight at a time is whole beside the model."""

    @torch.no_grad()
    def snapshot_into(self, image: WeightImage) -> None:
        """Write header and weights into the image.

        Raises:
            ValueError: the image does not have the layout's size.
            Conflict: the image is still being read.
        """
        layout = self.layout
        if image.image_bytes != layout.image_bytes:
            raise ValueError(f"the weights take {layout.image_bytes} bytes, the image has {image.image_bytes}")
        with image.writing() as view:
            view[: len(layout.header)] = layout.header
            write_parts(image.mapped, layout, self.image_parts())
