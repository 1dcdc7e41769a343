"""A module's parameters in one flat buffer per dtype, so that a snapshot of all weights is one copy per dtype.

Copying parameter by parameter at publication costs more than the transfer itself. Here the parameters are views of the
flat buffers from the start; the parameter objects stay, so optimizers made before or after work alike.
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from flotilla.services.trainer.weights.named_weights import Label, NamedWeights
from flotilla.services.trainer.weights.parts import Increment, index_of
from flotilla.shared.weights.image.image import WeightImage
from flotilla.shared.weights.image.tensors import TORCH_DTYPES, flat_view, on_wire


class FlatParameters:
    """Lays all parameters of a module into flat buffers, keeping their values, and copies them to and from images.

    Names are those of the Hugging Face checkpoint (``checkpoint_names``), and for weights that are tied the one name
    that ``save_pretrained`` keeps. Buffers are not parameters: they do not train and do not travel.

    Args:
        module: on one device, its parameters plain tensors (``ShardedParameters`` is for sharded ones).
        wire_dtype: floating-point dtype that snapshots are cast to, such as bfloat16; None keeps each dtype.
        names: paths of the parameters that are meant; None for all.
        increment: what is added to weights in images, and only there; None for nothing.
        label: of images; None gives the weights the checkpoint's names.

    Raises:
        ValueError: no parameters, several devices, sharded or meta tensors, or a dtype that images do not hold.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        wire_dtype: torch.dtype | None = None,
        names: Collection[str] | None = None,
        increment: Increment | None = None,
        label: Label | None = None,
    ) -> None:
        named = NamedWeights.of(module, wire_dtype, names, label=label)
        _check(named.groups)
        self.buffers: dict[torch.dtype, Tensor] = {
            dtype: _flatten([named.groups[name] for name in names]) for dtype, names in named.by_dtype.items()
        }
        self._wire_dtype = wire_dtype
        self._first = named.first
        self._named, self._increment = named, increment
        self.layout = named.layout

    @torch.no_grad()
    def copies(self, *, as_published: bool) -> dict[str, Tensor]:
        """Copy the weights, by dtype: as they are, or as receivers have them after a publication."""
        wire_dtype = self._wire_dtype if as_published else None
        return {
            str(dtype).removeprefix("torch."): buffer.to(on_wire(dtype, wire_dtype), copy=True).to(dtype)
            for dtype, buffer in self.buffers.items()
        }

    @torch.no_grad()
    def fill(self, copies: Mapping[str, Tensor]) -> None:
        """Put copies back, in place."""
        for name, copied in copies.items():
            self.buffers[getattr(torch, name)].copy_(copied)

    def from_runs(self, runs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy what a file holds by dtype."""
        return {name: run.to(self.buffers[getattr(torch, name)].device).clone() for name, run in runs.items()}

    @torch.no_grad()
    def snapshot_into(self, image: WeightImage) -> None:
        """Write header and weights into the image.

        Raises:
            ValueError: the image does not have the layout's size.
            Conflict: the image is still being read.
        """
        if image.image_bytes != self.layout.image_bytes:
            raise ValueError(f"the weights take {self.layout.image_bytes} bytes, the image has {image.image_bytes}")
        with image.writing() as view:
            view[: len(self.layout.header)] = self.layout.header
            for buffer, segment in self._segments(image):
                segment.copy_(buffer)
                if self._increment is not None:
                    self._add(buffer.dtype, segment, self._increment)

    @torch.no_grad()
    def load_from(self, image: WeightImage) -> None:
        """Take over the weights of an image, in place.

        Raises:
            ValueError: the image holds other names, shapes or dtypes.
        """
        if image.layout().tensors != self.layout.tensors:
            raise ValueError("the image holds other tensors than this module")
        for buffer, segment in self._segments(image):
            buffer.copy_(segment)

    def _add(self, dtype: torch.dtype, segment: Tensor, increment: Increment) -> None:
        """Add to a run of weights in an image, one weight at a time."""
        start = 0
        for name in self._named.by_dtype[dtype]:
            weight = self._named.groups[name][0]
            added = increment(name, index_of(weight))
            if added is not None:
                segment[start : start + weight.numel()].view(weight.shape).copy_(weight.float() + added)
            start += weight.numel()

    def _segments(self, image: WeightImage) -> list[tuple[Tensor, Tensor]]:
        specs = {spec.name: spec for spec in self.layout.tensors}
        pairs = []
        for dtype, buffer in self.buffers.items():
            spec = specs[self._first[dtype]]
            pairs.append((buffer, flat_view(image.mapped, spec.dtype, spec.start, buffer.numel())))
        return pairs


def _check(groups: Mapping[str, list[nn.Parameter]]) -> None:
    devices = {tied[0].device for tied in groups.values()}
    if len(devices) > 1 or "meta" in {device.type for device in devices}:
        raise ValueError(f"parameters must be on one real device, not on {', '.join(sorted(map(str, devices)))}")
    for name, tied in groups.items():
        if type(tied[0].data) is not Tensor:
            raise ValueError(f"{name} is a {type(tied[0].data).__name__}; only plain tensors can be views of a buffer")
        if tied[0].dtype not in TORCH_DTYPES.values():
            raise ValueError(f"{name} has dtype {tied[0].dtype}, which weight images do not hold")


@torch.no_grad()
def _flatten(groups: list[list[nn.Parameter]]) -> Tensor:
    first = groups[0][0]
    flat = torch.empty(sum(tied[0].numel() for tied in groups), dtype=first.dtype, device=first.device)
    offset = 0
    for tied in groups:
        shape = tied[0].shape
        view = flat[offset : offset + shape.numel()].view(shape)
        view.copy_(tied[0])
        for parameter in tied:
            parameter.data = view
        offset += shape.numel()
    return flat
