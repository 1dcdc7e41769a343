"""A rank's part of the tensors of a file: where it lies, written by each rank into a mapping that all of them share.

The file is an ordinary safetensors file of whole tensors, whatever number of ranks wrote it: one written by two is read
by one or by four. Ranks write different bytes, so they wait for each other only at the end.
"""

import math
import mmap
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from flotilla.shared.weights.image.layout import ImageLayout
from flotilla.shared.weights.image.tensors import TORCH_DTYPES, flat_view, host_memory, safetensors_name

Index = tuple[slice | Tensor, ...]
"""Of each dim the elements; at most one dim has a tensor of positions, where they are no run."""
Increment = Callable[[str, Index], Tensor | None]
"""From a parameter's path, and which of its elements are asked for, to what is added to these; None for nothing."""


@dataclass(frozen=True, eq=False)
class Part:
    """What one rank has of a region of a file's tensor.

    Attributes:
        tensor: name in the file of the tensor that the region begins in.
        start: the region's first element, counted in that tensor. A region may run on into the tensors that follow.
        shape: of the region.
        index: which elements of the region these are.
        values: the elements; empty where another rank writes them.
    """

    tensor: str
    start: int
    shape: tuple[int, ...]
    index: Index
    values: Tensor


def local_of(tensor: Tensor) -> Tensor:
    """Return what this rank has of a tensor: its shard, or the whole of one that is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def index_of(tensor: Tensor) -> Index:
    """Return which elements of the whole tensor this rank's shard is."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    found = tuple(_owned(tensor, dim) for dim in range(tensor.dim()))
    assert sum(isinstance(each, Tensor) for each in found) <= 1
    return found


def _owned(tensor: DTensor, dim: int) -> slice | Tensor:
    """Find this rank's positions of one dim, which the mesh's axes divide in their order.

    A strided axis divides each of some equal parts: the halves of a fused weight, or what a later axis divides further.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    owned = torch.arange(tensor.shape[dim])
    for axis, placement in enumerate(tensor.placements):
        if not isinstance(placement, Shard | _StridedShard) or placement.dim % tensor.dim() != dim:
            continue
        count = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
        size = int(tensor.device_mesh.size(axis))
        owned = torch.cat([_chunk(part, size, coordinate[axis]) for part in owned.chunk(count)])
    if not owned.numel():
        return slice(0, 0)
    first, last = int(owned[0]), int(owned[-1])
    return slice(first, last + 1) if last - first + 1 == owned.numel() else owned


def _chunk(positions: Tensor, count: int, number: int) -> Tensor:
    chunks = positions.chunk(count)
    return chunks[number] if number < len(chunks) else positions[:0]


def is_writer(tensor: Tensor, *, is_leader: bool) -> bool:
    """Whether this rank is the one that writes its elements: of those that have the same, the first."""
    if not isinstance(tensor, DTensor):
        return is_leader
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    placed = zip(coordinate, tensor.placements, strict=True)
    return all(position == 0 for position, placement in placed if isinstance(placement, Replicate))


def part_of(tensor: Tensor, name: str, *, is_leader: bool, start: int = 0) -> Part:
    """Describe this rank's part of a tensor that lies in a file's tensor from element ``start`` on."""
    values = local_of(tensor.detach())
    if not is_writer(tensor, is_leader=is_leader):
        values = values.new_empty(0)
    return Part(name, start, tuple(tensor.shape), index_of(tensor), values)


def layout_of_tensors(tensors: Mapping[str, Tensor]) -> ImageLayout:
    """Lay out a file for whole tensors by name; shards count with the shape of the whole."""
    return ImageLayout.of(
        {name: (tuple(tensor.shape), safetensors_name(tensor.dtype)) for name, tensor in tensors.items()}
    )


def write_parts(mapped: mmap.mmap, layout: ImageLayout, parts: Iterable[Part]) -> None:
    """Write this rank's elements where they belong, cast to the file's dtypes; header and other elements stay."""
    places = {spec.name: (spec.dtype, spec.start) for spec in layout.tensors}
    for part in parts:
        if part.values.numel() == 0:
            continue
        dtype, start = places[part.tensor]
        first = start + part.start * TORCH_DTYPES[dtype].itemsize
        region = flat_view(mapped, dtype, first, math.prod(part.shape)).view(part.shape)
        region[part.index] = part.values.to(region)


def write_whole_parts(path: Path, layout: ImageLayout, parts: Iterable[Part]) -> list[Part]:
    """Write the parts that are whole regions without mapping the file, whose fresh pages would each be a fault.

    Returns:
        the other parts.

    Raises:
        OSError: the disk fails.
    """
    places = {spec.name: (spec.dtype, spec.start) for spec in layout.tensors}
    others = []
    with path.open("r+b", buffering=0) as file:
        for part in parts:
            if any(
                isinstance(own, Tensor) or own != slice(0, size)
                for own, size in zip(part.index, part.shape, strict=True)
            ):
                others.append(part)
                continue
            dtype, start = places[part.tensor]
            values = part.values.to(device="cpu", dtype=TORCH_DTYPES[dtype]).contiguous()
            view = host_memory(values.data_ptr(), values.nbytes)
            at = start + part.start * TORCH_DTYPES[dtype].itemsize
            while view:
                written = os.pwrite(file.fileno(), view, at)
                view, at = view[written:], at + written
    return others


def reserve_file(path: Path, layout: ImageLayout) -> None:
    """Make a file with its header and room for its tensors: a page that is missing later would be a bus error.

    Raises:
        OSError: the disk has no room.
    """
    with path.open("xb") as file:
        file.write(layout.header)
        file.flush()
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, layout.image_bytes)
        else:
            file.truncate(layout.image_bytes)


def map_file(path: Path) -> mmap.mmap:
    """Map a file that :func:`reserve_file` made. It is not closed by hand: the last view of it ends it."""
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def localized(whole: Tensor, like: Tensor) -> Tensor:
    """Return a copy of a whole tensor, sharded as another one of its shape is; each rank copies its own part."""
    if not isinstance(like, DTensor):
        return whole.to(like.device).clone()
    local = whole[index_of(like)].to(like.to_local().device).clone()
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
