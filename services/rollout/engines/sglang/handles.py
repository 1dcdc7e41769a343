"""Loads weights by ``/update_weights_from_tensor``: bucket by bucket, each held where the server's ranks can map it."""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flotilla.services.rollout.engines.servers.dialect import Body, Caller
from flotilla.services.rollout.engines.sglang.buckets import Buckets
from flotilla.shared.errors import FlotillaError
from flotilla.shared.models.weight_files import safetensors_files
from flotilla.shared.schemas.publication import TensorSpec
from flotilla.shared.weights.image.layout import read_layout

log = logging.getLogger(__name__)

Piece = tuple[Path, range]
"""A file, and which of its tensors, in the order of their bytes."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Weights of which the first piece is held.

    Attributes:
        pieces: of them, at least one.
        handles: of the first piece, one for each rank.
        num_ranks: of the server.
    """

    pieces: Sequence[Piece]
    handles: list[str]
    num_ranks: int


class LoadingByHandles:
    """Has one server load weights out of buckets.

    Args:
        buckets: that hold them.
    """

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._num_ranks: int | None = None

    async def prepare(self, caller: Caller, source: Path) -> Prepared | None:
        """Hold the first piece of a directory's weights, while the server still samples.

        Returns:
            What ``load`` continues with; None if they cannot be held, and nothing has happened.
        """
        if self._num_ranks is None:
            self._num_ranks = int((await caller.get("/server_info"))["tp_size"])
        pieces = await asyncio.to_thread(pieces_of, source, self._buckets.bucket_bytes)
        try:
            handles = await self._buckets.hold(*pieces[0], num_ranks=self._num_ranks)
        except FlotillaError as error:
            log.warning("weights are loaded from their file", extra={"cause": error.detail})
            return None
        return Prepared(pieces, handles, self._num_ranks)

    async def load(self, caller: Caller, prepared: Prepared, ending: Body, *, seconds: float) -> None:
        """Have a paused server load all pieces; errors as of ``Caller.post`` and ``Buckets.hold``.

        Args:
            caller: of the server.
            prepared: by ``prepare``.
            ending: fields of the call for the last piece: the version, and whether the cache is thrown away.
            seconds: deadline of each call.
        """
        handles, last = prepared.handles, len(prepared.pieces) - 1
        try:
            await caller.post("/begin_weight_update", {}, seconds=seconds)
            for number, piece in enumerate(prepared.pieces):
                if number > 0:
                    handles = await self._buckets.hold(*piece, num_ranks=prepared.num_ranks)
                body = {
                    "serialized_named_tensors": handles,
                    "load_format": "flattened_bucket",
                    **(ending if number == last else {"flush_cache": False}),
                }
                await caller.post("/update_weights_from_tensor", body, seconds=seconds)
            await caller.post("/end_weight_update", {}, seconds=seconds)
        finally:
            await self._buckets.release()


def pieces_of(directory: Path, bucket_bytes: int) -> list[Piece]:
    """Cut a directory's weights into pieces of at most so many bytes, or of one tensor."""
    layouts = [(file, read_layout(file)) for file in safetensors_files(directory)]
    return [(file, span) for file, layout in layouts for span in spans_of(layout.tensors, bucket_bytes)]


def spans_of(tensors: Sequence[TensorSpec], bucket_bytes: int) -> Iterator[range]:
    """Cut tensors, in the order of their bytes, into runs of at most so many bytes, or of one tensor."""
    first = 0
    for index in range(1, len(tensors) + 1):
        if index == len(tensors) or tensors[index].end - tensors[first].start > bucket_bytes:
            yield range(first, index)
            first = index
