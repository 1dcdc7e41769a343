"""The image as it arrives: ranges of it come from several sources at once, and are written where they belong."""

import asyncio
import contextlib
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from flotilla.shared.errors import FlotillaError, Unavailable, WeightTransferFailed
from flotilla.shared.weights.image.image import WeightImage
from flotilla.shared.weights.image.off_loop import close_images, create_image
from flotilla.shared.weights.image.prefix_checksum import PrefixChecksum

Reuse = Callable[[int], WeightImage | None]
"""Lends an own image of so many bytes to write into, taken back from other use; None where there is none.

It is closed, and its file is gone, unless the pull succeeds; then its path is returned, and it is given back."""
OnArrived = Callable[[Path, int], None]
"""Called with the number of bytes, from the file's start, that have arrived; they are not verified yet."""
SILENCE_SECONDS = 10.0
"""A source that sends nothing for so long is abandoned."""
STALLED_BYTES = 1 << 20
"""A source that sends less between two checks is left, if another one is idle."""


RANGE_BYTES = 64 << 20
"""What one connection fetches at a time: as much as a source that breaks off or lies about its speed can hold up."""
ALONE = 8
"""As many such ranges at once come from a source beside which there is no other, and which can so hold up none: asking
for one takes the processor time in which 20 MB arrive on loopback."""


class MissingRanges:
    """Ranges to fetch, first ones first; what a source left of one comes before all others.

    Until the size is known only the beginning can be fetched, by one at a time.
    """

    def __init__(self) -> None:
        self._open = deque([range(RANGE_BYTES)])
        self._taken: list[range] = []
        self.size: int | None = None

    def learn(self, size: int) -> None:
        """Note how many bytes the image has; called once, while the beginning is being fetched."""
        self.size = size
        if size > RANGE_BYTES:
            self._open.append(range(RANGE_BYTES, size))

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing any more."""
        return self.size is not None and not self._open and not self._taken

    @property
    def num_first(self) -> int:
        """How many bytes from the beginning on are there: none of them is written again."""
        if self.size is None:
            return 0
        return min((span.start for span in (*self._open, *self._taken)), default=self.size)

    def take(self, *, is_alone: bool = False) -> range | None:
        """Take a range to fetch; None if all that is missing is on its way, or the size is not known yet.

        Args:
            is_alone: whether there is no other source.
        """
        if not self._open:
            return None
        span = self._open.popleft()
        if rest := span[RANGE_BYTES * (ALONE if is_alone else 1) :]:
            self._open.appendleft(rest)
        self._taken.append(taken := range(span.start, rest.start if rest else span.stop))
        return taken

    def settle(self, taken: range, num_bytes: int) -> None:
        """Give a range back, of which so many bytes are there."""
        self._taken.remove(taken)
        stop = taken.stop if self.size is None else min(taken.stop, self.size)
        if taken.start + num_bytes < stop:
            self._open.appendleft(range(taken.start + num_bytes, stop))


class Source(Protocol):
    """A source of an image.

    Attributes:
        url: names it in messages.
        is_origin: whether it made the image: its description goes before those of others.
        strikes: how often in a row it failed without a byte in between.
        failure: why it is left.
    """

    @property
    def url(self) -> str: ...

    @property
    def is_origin(self) -> bool: ...

    strikes: int
    failure: FlotillaError | None

    async def fetch(self, arriving: "ArrivingImage", arrival: "Arrival") -> None:
        """Fetch a range into the image, once ``arriving.expect`` has let it in.

        Raises:
            Unavailable: the source cannot be reached, failed, or broke off.
            FlotillaError: it does not offer this image.
        """


class Stream(Protocol):
    """Bytes of a range on their way."""

    num_received: int
    """How many are there."""

    def stop(self) -> None:
        """Have no more of them written."""


@dataclass(eq=False)
class Arrival:
    """A range on its way."""

    source: Source
    span: range
    num_received: int = 0
    stream: Stream | None = None
    looked_at: float | None = None
    num_then: int = 0

    def count(self) -> int:
        """Count what is there."""
        if self.stream is not None:
            self.num_received = self.stream.num_received
        return self.num_received


class ArrivingImage:
    """An image of which ranges arrive in any order.

    Args:
        directory: where its file goes; None chooses shared memory where there is room.
        checksum: that it must have; None believes the first source.
        reuse: where it may go instead: memory that was touched before takes a quarter of the processor time.
        on_arrived: called with its progress.
        image_bytes: size that it must have; None believes the first source, unless the origin announces another.
    """

    def __init__(
        self,
        directory: Path | None,
        checksum: str | None,
        reuse: Reuse | None = None,
        on_arrived: OnArrived | None = None,
        image_bytes: int | None = None,
    ) -> None:
        self._image_bytes = image_bytes
        self._reuse = reuse
        self._on_arrived = on_arrived
        self._directory = directory
        self._believes = checksum is None
        self._checksum = checksum
        self._creating = asyncio.Lock()
        self._changed = asyncio.Event()
        self._arrivals: list[Arrival] = []
        self._asked: set[Source] = set()
        self._resting: set[Source] = set()
        self._rests: Counter[Source] = Counter()
        self.cores = threading.Semaphore(max(1, len(os.sched_getaffinity(0)) // 2))
        """A thread that moves or reads bytes holds one: a pull takes half of the cores at most, the others may
        train."""
        self.checksum = PrefixChecksum(self.cores)
        self.missing = MissingRanges()
        self.image: WeightImage | None = None
        self._is_lent = False
        self.num_received = 0
        self.is_disputed = False
        """The origin reports another size of the image than the first source to answer."""
        self.is_replaced = False
        """The only source has another image by now: it has to be fetched from its beginning."""

    async def next_range(self, source: Source, look_seconds: float, stall_seconds: float) -> range | None:
        """Wait for a range that a source can fetch; None if the image is whole, or the source is left.

        A source that waits here takes over from others that stall.
        """
        self._asked.add(source)
        while not (self.missing.is_whole or self.is_disputed) and source.failure is None:
            if all(each in self._resting or each.failure is not None for each in self._asked - {source}):
                self._resting.discard(source)  # The source that took over from it is gone.
            if source not in self._resting and (span := self.missing.take(is_alone=len(self._asked) == 1)) is not None:
                return span
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(look_seconds):
                    await self._changed.wait()
            self._take_over(source, stall_seconds)
        return None

    def is_resting(self, source: Source) -> bool:
        """Whether another source has taken over from this one, which had stalled."""
        return source in self._resting

    async def take(self, source: Source, span: range) -> None:
        """Fetch a range; what arrived of it counts, whatever happens.

        Raises:
            Unavailable: the source cannot be reached, failed, or broke off.
            FlotillaError: it does not offer this image.
        """
        arrival = Arrival(source, span)
        self._arrivals.append(arrival)
        try:
            await source.fetch(self, arrival)
        finally:
            self._arrivals.remove(arrival)
            self.num_received += arrival.count()
            if arrival.num_received:
                source.strikes = 0
            self.missing.settle(span, arrival.num_received)
            if self.image is not None and not self.image.is_closed:
                self.checksum.advance(self.image, self.missing.num_first)
                self.tell()
            self.notify()

    @property
    def num_arrived(self) -> int:
        """How many bytes have come, also of ranges that are arriving."""
        return self.num_received + sum(arrival.count() for arrival in self._arrivals)

    def tell(self) -> None:
        """Report the bytes received to ``on_arrived``, also within ranges that are arriving."""
        if self._on_arrived is not None and self.image is not None and not self.image.is_closed:
            self._on_arrived(self.image.path, max(self.missing.num_first, self.checksum.num_summed))

    def notify(self) -> None:
        """Have those that wait for a range look again."""
        self._changed.set()

    async def settled(self) -> None:
        """Wait until nothing of it is read, as far as it is there; comes before ``finish``."""
        await self.checksum.settled()

    def finish(self) -> Path:
        """Check the whole file and hand it over; blocks.

        Raises:
            WeightTransferFailed: the checksum is not the right one, or it is no image.
        """
        assert self.image is not None
        found = self.checksum.finish(self.image)
        if found != self._checksum:
            raise WeightTransferFailed(f"the pulled image has checksum {found}, it should have {self._checksum}")
        self.image.layout()
        return self.image.give_back() if self._is_lent else self.image.hand_over()

    async def expect(self, arrival: Arrival, sent: range, size: int, checksum: str) -> WeightImage:
        """Hold what a source is about to send against what it was asked for; gives the image to write it into.

        Args:
            arrival: the range that was asked for; one that goes beyond the end is shortened.
            sent: the range that comes.
            size: of the source's image.
            checksum: of the source's image.

        Raises:
            WeightTransferFailed: it is not of this image, or there is no room for it.
            ValueError: the image was abandoned meanwhile.
        """
        async with self._creating:
            if self.image is None:
                self._checksum = self._checksum or checksum
            if checksum != self._checksum:
                self.is_replaced = self._believes
                detail = f"{arrival.source.url} offers an image of checksum {checksum}, not {self._checksum}"
                raise Unavailable(detail) if self._believes else WeightTransferFailed(detail)
            if size < 1:
                raise WeightTransferFailed(f"{arrival.source.url} announces an image of 0 bytes")
            if size != (self._image_bytes or size):
                detail = f"{arrival.source.url} announces an image of {size} bytes, not {self._image_bytes}"
                raise WeightTransferFailed(detail)
            if self.image is None:
                self.image = await self._made(size)
                self.missing.learn(size)
                self.notify()
        wanted = range(arrival.span.start, min(arrival.span.stop, self.image.image_bytes))
        if arrival.source.is_origin and size != self.image.image_bytes:
            self.is_disputed = True
            for each in self._arrivals:
                if each.stream is not None:
                    each.stream.stop()
        if sent != wanted or size != self.image.image_bytes:
            raise WeightTransferFailed(
                f"{arrival.source.url} sends bytes {sent.start} to {sent.stop} of {size}, not {wanted}"
            )
        arrival.span = wanted
        return self.image

    async def _made(self, size: int) -> WeightImage:
        image = None if self._reuse is None else self._reuse(size)
        self._is_lent = image is not None
        if image is None:
            image = await create_image(size, directory=self._directory, is_reserved=False)
        return image

    async def close(self) -> None:
        """Give the image up."""
        self.checksum.abandon()
        if self.image is not None:
            await close_images(self.image)

    def _take_over(self, source: Source, stall_seconds: float) -> None:
        """Take the ranges away from sources that send next to nothing, since this one has nothing to do.

        They rest, and may take over in their turn: one bad moment proves little, and this one may be slower still. Who
        has rested waits twice as long as the time before, so two slow ones do not take turns all the time.
        """
        now, patience = time.monotonic(), stall_seconds * 2 ** self._rests[source]
        for arrival in self._arrivals:
            if arrival.stream is None:
                continue  # It has not begun, and has deadlines of its own until then.
            if arrival.looked_at is None:
                arrival.looked_at = now
            elif arrival.source is not source and now - arrival.looked_at >= patience:
                if arrival.count() - arrival.num_then < STALLED_BYTES:
                    self._rests[arrival.source] += arrival.source not in self._resting
                    self._resting.add(arrival.source)
                    self._resting.discard(source)
                    arrival.stream.stop()
                arrival.looked_at, arrival.num_then = now, arrival.num_received
