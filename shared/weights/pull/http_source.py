"""A source of an image that is reached over HTTP: the trainer, or a rollout that keeps it."""

import asyncio
import contextlib
import re
from dataclasses import dataclass

import httpx

from flotilla.shared.concurrency.cancelling import until_done
from flotilla.shared.concurrency.daemon_threads import on_daemon_thread
from flotilla.shared.errors import FlotillaError, Unavailable, WeightTransferFailed
from flotilla.shared.net.client.client import problem_to_error
from flotilla.shared.weights.image.image import WeightImage
from flotilla.shared.weights.pull.direct import TICKET_BYTES, DirectReceiver
from flotilla.shared.weights.pull.server import PORT, TICKET, WANTS_TICKET
from flotilla.shared.weights.pull.source import SILENCE_SECONDS, Arrival, ArrivingImage

CONNECT_SECONDS = 5.0
CHUNK_BYTES = 1 << 20
LAST_PORT = 65535

_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")
_TICKET = re.compile(rf"[0-9a-f]{{{2 * TICKET_BYTES}}}")
_PORT = re.compile(r"\d{1,5}")


@dataclass(eq=False)
class HttpSource:
    """See ``Source``.

    Attributes:
        url: of the version there.
        token: what it is shown.
        may_be_direct: whether its plain connections may be used, and can be reached.
        is_origin: see ``Source``.
    """

    client: httpx.AsyncClient
    url: str
    token: str
    may_be_direct: bool
    is_origin: bool = False
    strikes: int = 0
    failure: FlotillaError | None = None

    async def fetch(self, arriving: ArrivingImage, arrival: Arrival) -> None:
        """See ``Source.fetch``."""
        try:
            async with self.client.stream("GET", self.url, headers=self._headers(arrival.span)) as answer:
                if not answer.is_success:
                    problem = problem_to_error(answer.status_code, await answer.aread())
                    # What went wrong within the server may go well the next time.
                    raise Unavailable(problem.detail) if answer.is_server_error else problem
                image = await self._expect(answer, arriving, arrival)
                if self.may_be_direct and TICKET in answer.headers:
                    await self._take_directly(image, arrival, answer, arriving)
                else:
                    await self._take_body(image, arrival, answer)
        except httpx.HTTPError as error:
            raise Unavailable(f"pulling {self.url} broke off: {error or type(error).__name__}") from error

    def _headers(self, span: range) -> dict[str, str]:
        headers = {"Authorization": f"Bearer {self.token}", "Accept-Encoding": "identity"}
        headers["Range"] = f"bytes={span.start}-{span.stop - 1}"
        return headers | ({WANTS_TICKET: "1"} if self.may_be_direct else {})

    async def _expect(self, answer: httpx.Response, arriving: ArrivingImage, arrival: Arrival) -> WeightImage:
        """Read from the answer's head what comes."""
        found = _CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
        if found is None or "etag" not in answer.headers:
            raise WeightTransferFailed(f"{self.url} does not name the range and image that it sends")
        start, stop, size = int(found[1]), int(found[2]) + 1, int(found[3])
        return await arriving.expect(arrival, range(start, stop), size, answer.headers["etag"].strip('"'))

    async def _take_directly(
        self, image: WeightImage, arrival: Arrival, answer: httpx.Response, arriving: ArrivingImage
    ) -> None:
        """Fetch what a ticket is good for; it is written where it belongs, on a thread.

        Raises:
            Unavailable: the port cannot be reached, which is not tried again, or the server broke off.
        """
        ticket, port = answer.headers[TICKET], answer.headers.get(PORT, "")
        if not _TICKET.fullmatch(ticket) or not _PORT.fullmatch(port) or int(port) > LAST_PORT:
            raise WeightTransferFailed(f"{self.url} gives a ticket that is none")
        host = answer.url.host
        receiver = arrival.stream = DirectReceiver(
            host,
            int(port),
            connect_seconds=CONNECT_SECONDS,
            silence_seconds=SILENCE_SECONDS,
            cores=arriving.cores,
            checksum=arriving.checksum,
        )
        span = arrival.span

        def receive() -> None:
            receiver.receive(bytes.fromhex(ticket), image, span)

        receiving = on_daemon_thread(receive, "direct weights")
        try:
            await asyncio.shield(receiving)
        except OSError as error:
            self.may_be_direct = receiver.is_connected
            raise Unavailable(f"pulling from {host}:{port} broke off: {error}") from error
        finally:
            if not receiving.done():
                # The memory must not be freed while the thread writes into it.
                receiver.stop()
                await until_done(receiving)

    async def _take_body(self, image: WeightImage, arrival: Arrival, answer: httpx.Response) -> None:
        """Write the answer's body where it belongs.

        Raises:
            Unavailable: it broke off, or was aborted because it stalled.
            WeightTransferFailed: it is longer than the range.
        """
        span = arrival.span
        try:
            async with asyncio.timeout(None) as limit:
                body = arrival.stream = _Body(limit)
                async for chunk in answer.aiter_raw(CHUNK_BYTES):
                    start = span.start + body.num_received
                    if start + len(chunk) > span.stop:
                        raise WeightTransferFailed(f"{self.url} sent more than the {len(span)} bytes of the range")
                    image.write_at(start, memoryview(chunk))
                    body.num_received += len(chunk)
        except TimeoutError:
            raise Unavailable(f"{self.url} sends next to nothing") from None
        if body.num_received < len(span):
            raise Unavailable(f"pulling {answer.url} broke off after {body.num_received} of {len(span)} bytes")


class _Body:
    """An answer's body on its way; see ``Stream``."""

    def __init__(self, limit: asyncio.Timeout) -> None:
        self._limit = limit
        self.num_received = 0

    def stop(self) -> None:
        """Have no more of it written; called on the event loop."""
        with contextlib.suppress(RuntimeError):  # it has just ended
            self._limit.reschedule(asyncio.get_running_loop().time())
