"""What ranks on other hosts have of a file's tensors: sent to the leader, which writes it where they would have.

Ranks of the leader's host write into the file themselves. The bytes are the same, whoever writes them, so neither an
image nor a checkpoint depends on where ranks are. Only one bucket of a rank is under way at a time, so the leader
never has a whole tensor that is larger than that, unless a rank's part of it is.
"""

import math
import mmap
from collections.abc import Iterable, Iterator
from typing import Any

import msgpack
import torch
from torch import Tensor

from services.trainer.parallel.ranks import Ranks
from shared.weights.layout import ImageLayout
from shared.weights.parts import Index, Part, write_parts
from shared.weights.tensors import TORCH_DTYPES

BUCKET_BYTES = 32 << 20


def send_parts(ranks: Ranks, layout: ImageLayout, parts: Iterable[Part]) -> None:
    """Send this rank's elements, cast to the file's dtypes; blocks until the leader has them."""
    dtypes = {spec.name: TORCH_DTYPES[spec.dtype] for spec in layout.tensors}
    for bucket, payload in _buckets(parts, dtypes):
        described = torch.frombuffer(bytearray(msgpack.packb(bucket)), dtype=torch.uint8)
        _send_length(ranks, len(described))
        ranks.send_to_leader(described)
        ranks.send_to_leader(payload)
    _send_length(ranks, 0)


def receive_parts(ranks: Ranks, layout: ImageLayout, mapped: mmap.mmap | None) -> None:
    """Leader: write what the ranks of other hosts send, one rank after the other; blocks.

    Args:
        ranks: the job.
        layout: of the file.
        mapped: the file; None receives everything all the same, and writes nothing.
    """
    dtypes = {spec.name: TORCH_DTYPES[spec.dtype] for spec in layout.tensors}
    for rank in sorted(ranks.remote):
        while length := int(ranks.receive_from(rank, 8).view(torch.int64)):
            bucket = msgpack.unpackb(ranks.receive_from(rank, length).numpy().tobytes())
            sizes = [math.prod(each[-1]) * dtypes[each[0]].itemsize for each in bucket]
            payload = ranks.receive_from(rank, sum(sizes))
            if mapped is not None:
                pieces = torch.split(payload, sizes)
                described = zip(bucket, pieces, strict=True)
                write_parts(mapped, layout, [_part(each, piece, dtypes[each[0]]) for each, piece in described])


def _send_length(ranks: Ranks, length: int) -> None:
    ranks.send_to_leader(torch.tensor([length], dtype=torch.int64).view(torch.uint8))


def _buckets(parts: Iterable[Part], dtypes: dict[str, torch.dtype]) -> Iterator[tuple[list[Any], Tensor]]:
    """Put parts together until they fill a bucket: what each is, and their bytes."""
    bucket: list[Any] = []
    pieces: list[Tensor] = []
    for part in parts:
        if part.values.numel() == 0:
            continue
        values = part.values.to(device="cpu", dtype=dtypes[part.tensor])
        bucket.append([part.tensor, part.start, part.shape, [_coded(each) for each in part.index], tuple(values.shape)])
        # Copied: what a part's values are may last until the next part only.
        pieces.append(values.reshape(-1).clone().view(torch.uint8))
        if sum(map(len, pieces)) >= BUCKET_BYTES:
            yield bucket, torch.cat(pieces)
            bucket, pieces = [], []
    if bucket:
        yield bucket, torch.cat(pieces)


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
