"""The checksum of an image whose bytes arrive in any order, computed from its beginning while others still come.

A writer of bytes sums them as well, while its core has them in the cache, if all before them is summed. What is left
out so is read again.
"""

import asyncio
import threading
from contextlib import AbstractContextManager

import xxhash

from flotilla.shared.errors import WeightTransferFailed
from flotilla.shared.weights.image.image import WeightImage

PIECE_BYTES = 32 << 20
CHUNK_BYTES = 1 << 20
"""Small enough to be in a core's cache when it is summed."""
CATCH_UP_BYTES = 4 << 20
"""How much is read again for each chunk that arrives behind what was not summed."""


class PrefixChecksum:
    """Sums an image from its beginning, up to where it is known to be there for good.

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
        self._summing = threading.Lock()
        self._reading: asyncio.Task[None] | None = None

    @property
    def num_summed(self) -> int:
        """How many bytes from the beginning on are there, and summed; any thread may look."""
        return self._num_read

    def follow(self, image: WeightImage, arrived: range, latest: memoryview) -> None:
        """Sum what a thread has just written, or some of what was there before. Blocks; the caller holds a core.

        Args:
            image: that is written.
            arrived: all that is there of the thread's range: none of it will be written again.
            latest: the last bytes of that.
        """
        if not self._summing.acquire(blocking=False):
            return
        try:
            if self._num_read == arrived.stop - len(latest):
                self._digest.update(latest)
                self._num_read = arrived.stop
            else:
                there = arrived.stop if self._num_read in arrived else self._num_there
                self._read_until(image, min(there, self._num_read + CATCH_UP_BYTES))
        finally:
            self._summing.release()

    def advance(self, image: WeightImage, num_bytes: int) -> None:
        """Note that the first so many bytes are there, and will not be written again."""
        self._num_there = num_bytes
        if self._num_read < num_bytes and (self._reading is None or self._reading.done()):
            self._reading = asyncio.create_task(self._read(image), name="checksum of arriving weights")

    async def settled(self) -> None:
        """Wait until all received bytes are read."""
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
        with self._cores, self._summing:
            self._read_until(image, span.stop)

    def _read_until(self, image: WeightImage, stop: int) -> None:
        while self._num_read < stop:
            num = image.read_at(self._num_read, self._chunk[: stop - self._num_read])
            if num == 0:
                raise WeightTransferFailed(f"{image.path.name} was cut off at byte {self._num_read}")
            self._digest.update(self._chunk[:num])
            self._num_read += num
