"""The sources of an image, and the image as it arrives: a range is asked for, and written where it belongs."""

import asyncio
import contextlib
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from shared.client import problem_to_error
from shared.daemon_threads import on_daemon_thread
from shared.errors import FlotillaError, Unavailable, WeightTransferFailed
from shared.weights.direct import DirectReceiver
from shared.weights.image import WeightImage
from shared.weights.missing import MissingRanges
from shared.weights.off_loop import create_image
from shared.weights.pull import PORT, TICKET, WANTS_TICKET

CONNECT_SECONDS = 5.0
SILENCE_SECONDS = 10.0
"""A source that sends nothing for so long is given up."""
STALLED_BYTES = 1 << 20
"""Who sends less between two looks is left, if another source has nothing to do."""
CHUNK_BYTES = 1 << 20

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


@dataclass(eq=False)
class Source:
    """Who offers an image.

    Attributes:
        url: of the version there.
        token: what it is shown.
        may_be_direct: whether its plain connections may be used, and can be reached.
        strikes: how often in a row it failed without a byte in between.
        failure: why it is left.
    """

    client: httpx.AsyncClient
    url: str
    token: str
    may_be_direct: bool
    strikes: int = 0
    failure: FlotillaError | None = None

    def headers(self, span: range) -> dict[str, str]:
        """Make the head of a request for a range."""
        headers = {"Authorization": f"Bearer {self.token}", "Accept-Encoding": "identity"}
        headers["Range"] = f"bytes={span.start}-{span.stop - 1}"
        return headers | ({WANTS_TICKET: "1"} if self.may_be_direct else {})


@dataclass(eq=False)
class Arrival:
    """A range on its way."""

    source: Source
    span: range
    num_received: int = 0
    receiver: DirectReceiver | None = None
    looked_at: float = field(default_factory=time.monotonic)
    num_then: int = 0

    def count(self) -> int:
        """Count what is there."""
        if self.receiver is not None:
            self.num_received = self.receiver.num_received
        return self.num_received


class ArrivingImage:
    """An image of which ranges arrive in any order.

    Args:
        directory: where its file goes; None chooses shared memory where there is room.
        checksum: that it must have; None believes the first source.
    """

    def __init__(self, directory: Path | None, checksum: str | None) -> None:
        self._directory = directory
        self._believes = checksum is None
        self._checksum = checksum
        self._creating = asyncio.Lock()
        self._changed = asyncio.Event()
        self._arrivals: list[Arrival] = []
        self.missing = MissingRanges()
        self.image: WeightImage | None = None
        self.num_received = 0
        self.is_replaced = False
        """The only source has another image by now: it has to be fetched from its beginning."""

    async def next_range(self, source: Source, look_seconds: float, stall_seconds: float) -> range | None:
        """Wait for a range that a source can fetch; None if the image is whole, or the source is left.

        Whoever waits here gives up the ranges of other sources that stall.
        """
        while not self.missing.is_whole and source.failure is None:
            if (span := self.missing.take()) is not None:
                return span
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(look_seconds):
                    await self._changed.wait()
            self._give_up_stalled(source, stall_seconds)
        return None

    async def take(self, source: Source, span: range) -> None:
        """Fetch a range; what arrived of it counts, whatever happens.

        Raises:
            Unavailable: the source cannot be reached, failed, or broke off.
            FlotillaError: it does not offer this image.
        """
        arrival = Arrival(source, span)
        self._arrivals.append(arrival)
        try:
            async with source.client.stream("GET", source.url, headers=source.headers(span)) as answer:
                if not answer.is_success:
                    problem = problem_to_error(answer.status_code, await answer.aread())
                    # What went wrong within the server may go well the next time.
                    raise Unavailable(problem.detail) if answer.is_server_error else problem
                image = await self._expect(answer, arrival)
                take = self._take_directly if TICKET in answer.headers else self._take_body
                await take(image, arrival, answer)
        except httpx.HTTPError as error:
            raise Unavailable(f"pulling {source.url} broke off: {error or type(error).__name__}") from error
        finally:
            self._arrivals.remove(arrival)
            self.num_received += arrival.count()
            if arrival.num_received:
                source.strikes = 0
            self.missing.settle(span, arrival.num_received)
            self.notify()

    def notify(self) -> None:
        """Have those that wait for a range look again."""
        self._changed.set()

    def finish(self) -> Path:
        """Check the whole file and give it its name; blocks.

        Raises:
            WeightTransferFailed: the checksum is not the right one, or it is no image.
        """
        assert self.image is not None
        checksum = self.image.checksum()
        if checksum != self._checksum:
            raise WeightTransferFailed(f"the pulled image has checksum {checksum}, it should have {self._checksum}")
        self.image.layout()
        return self.image.hand_over()

    async def _expect(self, answer: httpx.Response, arrival: Arrival) -> WeightImage:
        """Read from the answer's head what comes.

        Raises:
            WeightTransferFailed: it is not of this image, or there is no room for it.
        """
        found = _CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
        if found is None or "etag" not in answer.headers:
            raise WeightTransferFailed(f"{arrival.source.url} does not say which range of which image it sends")
        start, stop, size = int(found[1]), int(found[2]) + 1, int(found[3])
        checksum = answer.headers["etag"].strip('"')
        async with self._creating:
            if self.image is None:
                self._checksum = self._checksum or checksum
            if checksum != self._checksum:
                self.is_replaced = self._believes
                detail = f"{arrival.source.url} offers an image of checksum {checksum}, not {self._checksum}"
                raise Unavailable(detail) if self._believes else WeightTransferFailed(detail)
            if self.image is None:
                self.image = await create_image(size, directory=self._directory, is_partial=True, is_reserved=False)
                self.missing.learn(size)
                self.notify()
        wanted = range(arrival.span.start, min(arrival.span.stop, self.image.image_bytes))
        if range(start, stop) != wanted or size != self.image.image_bytes:
            raise WeightTransferFailed(f"{arrival.source.url} sends bytes {start} to {stop} of {size}, not {wanted}")
        arrival.span = wanted
        return self.image

    async def _take_directly(self, image: WeightImage, arrival: Arrival, answer: httpx.Response) -> None:
        """Fetch what a ticket is good for; it is written where it belongs, on a thread.

        Raises:
            Unavailable: the port cannot be reached, which is not tried again, or the server broke off.
        """
        host, port = answer.url.host, int(answer.headers[PORT])
        times = {"connect_seconds": CONNECT_SECONDS, "silence_seconds": SILENCE_SECONDS}
        receiver = arrival.receiver = DirectReceiver(host, port, **times)
        span, ticket = arrival.span, bytes.fromhex(answer.headers[TICKET])

        def receive() -> None:
            image.reserve(span)
            with image.view[span.start : span.stop] as target:
                receiver.receive(ticket, target)

        receiving = on_daemon_thread(receive, "direct weights")
        try:
            await asyncio.shield(receiving)
        except OSError as error:
            arrival.source.may_be_direct = receiver.is_connected
            raise Unavailable(f"pulling from {host}:{port} broke off: {error}") from error
        finally:
            if not receiving.done():
                # Nobody may take the memory away while the thread writes into it.
                receiver.stop()
                await asyncio.wait([receiving])

    async def _take_body(self, image: WeightImage, arrival: Arrival, answer: httpx.Response) -> None:
        span = arrival.span
        await asyncio.to_thread(image.reserve, span)
        async for chunk in answer.aiter_raw(CHUNK_BYTES):
            start = span.start + arrival.num_received
            if start + len(chunk) > span.stop:
                raise WeightTransferFailed(f"{arrival.source.url} sent more than the {len(span)} bytes of the range")
            image.view[start : start + len(chunk)] = chunk
            arrival.num_received += len(chunk)
        if arrival.num_received < len(span):
            raise Unavailable(f"pulling {answer.url} broke off after {arrival.num_received} of {len(span)} bytes")

    def _give_up_stalled(self, source: Source, stall_seconds: float) -> None:
        """Take the ranges away from sources that send next to nothing, since this one has nothing to do."""
        now = time.monotonic()
        for arrival in self._arrivals:
            if arrival.source is source or arrival.receiver is None or now - arrival.looked_at < stall_seconds:
                continue
            if arrival.count() - arrival.num_then < STALLED_BYTES:
                arrival.source.failure = Unavailable(f"{arrival.source.url} sends next to nothing")
                arrival.receiver.stop()
            arrival.looked_at, arrival.num_then = now, arrival.num_received
