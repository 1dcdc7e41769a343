"""The checksum of an image whose bytes arrive in any order, computed from its beginning while others still come."""

import asyncio
from contextlib import AbstractContextManager

import xxhash

from shared.errors import WeightTransferFailed
from shared.weights.image import WeightImage

PIECE_BYTES = 32 << 20
CHUNK_BYTES = 1 << 20
"""Small enough to be in a core's cache when it is summed."""


class PrefixChecksum:
    """Reads an image on a thread, up to where it is known to be there for good.

    Args:
        cores: held while a piece is read.
    """

    def __init__(self, cores: AbstractContextManager[object]) -> None:
        self._cores = cores
        self._digest = xxhash.xxh3_64()
        # Not by the mapping, of which each page would be found by a fault: that takes longer than a copy.
        self._chunk = memoryview(bytearray(CHUNK_BYTES))
        self._num_read = 0
        self._num_there = 0
        self._reading: asyncio.Task[None] | None = None

    def advance(self, image: WeightImage, num_bytes: int) -> None:
        """Note that the first so many bytes are there, and will not be written again."""
        self._num_there = num_bytes
        if self._num_read < num_bytes and (self._reading is None or self._reading.done()):
            self._reading = asyncio.create_task(self._read(image), name="checksum of arriving weights")

    async def settled(self) -> None:
        """Wait until all that is there is read."""
        if self._reading is not None:
            await asyncio.wait([self._reading])

    def abandon(self) -> None:
        """Read no further."""
        if self._reading is not None:
            self._reading.cancel()

    def finish(self, image: WeightImage) -> str:
        """Read the rest of a whole image; gives its checksum. Blocks; call it when it is settled."""
        self._update(image, range(self._num_read, image.image_bytes))
        return self._digest.hexdigest()

    async def _read(self, image: WeightImage) -> None:
        while self._num_read < self._num_there:
            span = range(self._num_read, min(self._num_there, self._num_read + PIECE_BYTES))
            await asyncio.to_thread(self._update, image, span)

    def _update(self, image: WeightImage, span: range) -> None:
        with self._cores:
            while self._num_read < span.stop:
                num = image.read_at(self._num_read, self._chunk[: span.stop - self._num_read])
                if num == 0:
                    raise WeightTransferFailed(f"{image.path.name} was cut off at byte {self._num_read}")
                self._digest.update(self._chunk[:num])
                self._num_read += num
