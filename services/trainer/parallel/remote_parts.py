"""What ranks on other hosts have of a file's tensors: sent to the leader, which writes it where they would have.

Ranks of the leader's host write into the file themselves. The bytes are the same on every rank, so neither an
image nor a checkpoint depends on where ranks are.

Making a part may take collectives of all ranks (adapters that are added to a weight), so no rank may be sending while
another makes the next one. Every rank lists the same regions in the same order, its own elements of each or none. That
order is cut into rounds by the size of the regions, equal on all ranks: a rank that ends a round sends its part,
and the leader receives that before its next part. A rank keeps no more than its elements of one round.
"""

import math
import mmap
from collections.abc import Iterable, Iterator
from typing import Any

import msgpack
import torch
from torch import Tensor

from flotilla.services.trainer.parallel.ranks import Ranks
from flotilla.services.trainer.weights.parts import Index, Part, write_parts
from flotilla.shared.weights.image.layout import ImageLayout
from flotilla.shared.weights.image.tensors import TORCH_DTYPES


def send_parts(ranks: Ranks, layout: ImageLayout, parts: Iterable[Part]) -> None:
    """Send this rank's elements, cast to the file's dtypes; blocks until the leader has them."""
    dtypes = _dtypes(layout)
    described: list[Any] = []
    pieces: list[Tensor] = []
    for part, ends_round in _in_rounds(ranks, layout, parts):
        if part is not None and part.values.numel():
            values = part.values.to(device="cpu", dtype=dtypes[part.tensor])
            index = [_coded(each) for each in part.index]
            described.append([part.tensor, part.start, part.shape, index, tuple(values.shape)])
            # Copied: what a part's values are may last until the next part only.
            pieces.append(values.reshape(-1).clone().view(torch.uint8))
        if ends_round:
            _send_round(ranks, described, pieces)
            described, pieces = [], []


def with_remote_parts(
    ranks: Ranks, layout: ImageLayout, mapped: mmap.mmap | None, parts: Iterable[Part]
) -> Iterator[Part]:
    """Go through this rank's parts; on the leader, write between them what ranks of other hosts send. Blocks.

    Args:
        ranks: the job.
        layout: of the file.
        mapped: the file; None receives everything all the same, and writes nothing.
        parts: of this rank, in the order of all ranks.
    """
    senders = sorted(ranks.remote) if ranks.is_leader else []
    for part, ends_round in _in_rounds(ranks, layout, parts):
        if part is not None:
            yield part
        if ends_round:
            for rank in senders:
                received = _receive_round(ranks, rank, _dtypes(layout))
                if mapped is not None:
                    write_parts(mapped, layout, received)


def receive_parts(ranks: Ranks, layout: ImageLayout, mapped: mmap.mmap | None, parts: Iterable[Part]) -> None:
    """Leader: write what ranks of other hosts send beside parts that it has written. Arguments as above."""
    for _ in with_remote_parts(ranks, layout, mapped, parts):
        pass


def _in_rounds(ranks: Ranks, layout: ImageLayout, parts: Iterable[Part]) -> Iterator[tuple[Part | None, bool]]:
    """Give each part, and whether a round ends with it; what is left at the end is a round, if there is no part, too.

    Which parts end one depends on their regions alone, which are equal on all ranks.
    """
    dtypes = _dtypes(layout)
    num_bytes = 0
    for part in parts:
        num_bytes += math.prod(part.shape) * dtypes[part.tensor].itemsize
        ends_round = num_bytes >= ranks.round_bytes
        yield part, ends_round
        num_bytes = 0 if ends_round else num_bytes
    yield None, True


def _send_round(ranks: Ranks, described: list[Any], pieces: list[Tensor]) -> None:
    description = torch.frombuffer(bytearray(msgpack.packb(described)), dtype=torch.uint8)
    ranks.send_to_leader(torch.tensor([len(description)], dtype=torch.int64).view(torch.uint8))
    ranks.send_to_leader(description)
    if pieces:
        ranks.send_to_leader(torch.cat(pieces))


def _receive_round(ranks: Ranks, rank: int, dtypes: dict[str, torch.dtype]) -> list[Part]:
    length = int(ranks.receive_from(rank, 8).view(torch.int64))
    described = msgpack.unpackb(ranks.receive_from(rank, length).numpy().tobytes())
    if not described:
        return []
    sizes = [math.prod(each[-1]) * dtypes[each[0]].itemsize for each in described]
    pieces = torch.split(ranks.receive_from(rank, sum(sizes)), sizes)
    return [_part(each, piece, dtypes[each[0]]) for each, piece in zip(described, pieces, strict=True)]


def _dtypes(layout: ImageLayout) -> dict[str, torch.dtype]:
    return {spec.name: TORCH_DTYPES[spec.dtype] for spec in layout.tensors}


def _part(described: list[Any], payload: Tensor, dtype: torch.dtype) -> Part:
    tensor, start, shape, index, own_shape = described
    # Cloned: a piece may begin at any byte, and elements may not.
    values = payload.clone().view(dtype).view(own_shape)
    return Part(tensor, start, tuple(shape), _decoded(index), values)


def _coded(owned: slice | Tensor) -> Any:
    return [owned.start, owned.stop] if isinstance(owned, slice) else owned.to(torch.int64).numpy().tobytes()


def _decoded(index: list[Any]) -> Index:
    return tuple(
        torch.frombuffer(bytearray(each), dtype=torch.int64) if isinstance(each, bytes) else slice(*each)
        for each in index
    )
