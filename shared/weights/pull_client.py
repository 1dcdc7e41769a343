"""Weights over HTTP, the client's side: a pull that breaks off goes on where it stopped, within one deadline.

The bytes come over a plain connection where the server offers one and it can be reached, else as the answer's body.
What arrives is written to a temporary file, checked, and only then renamed: a file with an image's name is complete.
"""

import asyncio
import logging
from pathlib import Path

import httpx

from shared.client import problem_to_error
from shared.credentials import Credentials
from shared.daemon_threads import on_daemon_thread
from shared.errors import DeadlineExceeded, FlotillaError, Unavailable, WeightTransferFailed
from shared.retry import Backoff, retry
from shared.schemas.service import ServiceKind
from shared.tls import tls_context
from shared.weights.direct import DirectReceiver
from shared.weights.image import WeightImage
from shared.weights.off_loop import close_images, create_image
from shared.weights.pull import NUM_BYTES, PORT, TICKET, WANTS_TICKET

CONNECT_SECONDS = 5.0
SILENCE_SECONDS = 10.0
"""A server that sends nothing for so long is given up, and asked again."""
CHUNK_BYTES = 1 << 20


class WeightPuller:
    """Fetches images from a trainer's ``weights_router``.

    Args:
        credentials: what the trainer is shown.
        transport: how to reach it; None for real connections.
    """

    def __init__(self, credentials: Credentials, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._credentials = credentials
        self._transport = transport

    async def __call__(self, url: str, version: int, directory: Path | None, deadline_seconds: float) -> Path:
        """Fetch a version into a new file, which is the caller's to remove; it is named so that ``sweep`` knows it.

        Args:
            url: of this version, such as ``http://host:port/v1/weights/3``.
            version: what the url names, for messages.
            directory: where the file goes; None chooses shared memory where there is room.
            deadline_seconds: for all attempts together.

        Raises:
            NotFound: the server does not offer the version.
            Unauthorized: the token is wrong.
            WeightTransferFailed: what arrived is not what the server said, or there is no room for it.
            Unavailable: the server could not be reached, or broke off, until the deadline.
            DeadlineExceeded: it was still sending at the deadline.
        """
        last: FlotillaError | None = None
        client = self._client()
        # A ticket is worth as much as the token was: it is not shown where HTTP would have been encrypted.
        pull = _Pull(directory, may_be_direct=self._transport is None and url.startswith("http://"))
        backoff = Backoff()

        async def attempt() -> Path:
            nonlocal last
            before = pull.num_received
            try:
                await pull.go_on(client, url)
            except Unavailable as error:
                last = error
                if pull.num_received > before:
                    backoff.reset()
                raise
            finishing = asyncio.ensure_future(asyncio.to_thread(pull.finish))
            try:
                return await asyncio.shield(finishing)
            except asyncio.CancelledError:
                # The thread goes on: whoever takes the file away has to come after it.
                await asyncio.gather(finishing, return_exceptions=True)
                raise

        try:
            async with asyncio.timeout(deadline_seconds), client:
                path = await retry(
                    attempt,
                    waiting_for=f"weights of version {version}",
                    backoff=backoff,
                    is_retryable=lambda error: isinstance(error, Unavailable),
                    level=logging.DEBUG,
                )
            pull.finished = None
            return path
        except TimeoutError:
            if last is not None:
                raise last from None
            raise DeadlineExceeded(f"pulling version {version} took more than {deadline_seconds} s") from None
        finally:
            await pull.close()

    def _client(self) -> httpx.AsyncClient:
        token = self._credentials.for_peer(ServiceKind.TRAINER)
        headers = {"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"}
        timeout = httpx.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS)
        return httpx.AsyncClient(
            headers=headers, timeout=timeout, transport=self._transport, trust_env=False, verify=tls_context()
        )


class _Pull:
    """One image on its way: the temporary file, how far it is, and what it shall become."""

    def __init__(self, directory: Path | None, *, may_be_direct: bool) -> None:
        self._directory = directory
        self._may_be_direct = may_be_direct
        self._image: WeightImage | None = None
        self._tag = ""
        self.finished: Path | None = None
        """The file, from when it has its name until the caller has it."""
        self.num_received = 0

    async def go_on(self, client: httpx.AsyncClient, url: str) -> None:
        """Ask for what is missing, and write it down as it comes.

        Raises:
            Unavailable: the server cannot be reached, failed, or broke off.
            FlotillaError: what its problem says.
        """
        headers = {"Range": f"bytes={self.num_received}-", "If-Range": self._tag} if self._image else {}
        if self._may_be_direct:
            headers[WANTS_TICKET] = "1"
        try:
            async with client.stream("GET", url, headers=headers) as answer:
                if not answer.is_success:
                    problem = problem_to_error(answer.status_code, await answer.aread())
                    # What went wrong within the server may go well the next time.
                    raise Unavailable(problem.detail) if answer.is_server_error else problem
                image = await self._expect(answer)
                if TICKET in answer.headers:
                    await self._take_directly(image, answer)
                async for chunk in answer.aiter_raw(CHUNK_BYTES):
                    self._write(image, chunk)
        except httpx.HTTPError as error:
            raise Unavailable(f"pulling {url} broke off: {error or type(error).__name__}") from error
        if self.num_received < image.image_bytes:
            raise Unavailable(f"pulling {url} broke off after {self.num_received} of {image.image_bytes} bytes")

    def finish(self) -> Path:
        """Check the whole file and give it its name; blocks.

        Raises:
            WeightTransferFailed: the checksum is not the server's, or it is no image.
        """
        assert self._image is not None
        checksum = self._image.checksum()
        if f'"{checksum}"' != self._tag:
            raise WeightTransferFailed(f"the pulled image has checksum {checksum}, the server said {self._tag}")
        self._image.layout()
        self.finished = self._image.hand_over()
        self._image = None
        return self.finished

    async def close(self) -> None:
        """Remove what the caller does not have."""
        if self._image is not None:
            await close_images(self._image)
        if self.finished is not None:
            self.finished.unlink(missing_ok=True)

    async def _take_directly(self, image: WeightImage, answer: httpx.Response) -> None:
        """Fetch what a ticket is good for; it is written where it belongs, on a thread.

        Raises:
            Unavailable: the port cannot be reached, which is not tried again, or the server broke off.
        """
        host, port = answer.url.host, int(answer.headers[PORT])
        times = {"connect_seconds": CONNECT_SECONDS, "silence_seconds": SILENCE_SECONDS}
        receiver = DirectReceiver(host, port, **times)
        before = self.num_received
        target = image.view[before : before + int(answer.headers[NUM_BYTES])]
        receiving = on_daemon_thread(
            lambda: receiver.receive(bytes.fromhex(answer.headers[TICKET]), target), "direct weights"
        )
        try:
            await asyncio.shield(receiving)
        except OSError as error:
            self._may_be_direct = receiver.is_connected
            raise Unavailable(f"pulling from {host}:{port} broke off: {error}") from error
        finally:
            if not receiving.done():
                # Nobody may take the memory away while the thread writes into it.
                receiver.stop()
                await asyncio.wait([receiving])
            self.num_received = before + receiver.num_received
            target.release()

    async def _expect(self, answer: httpx.Response) -> WeightImage:
        """Read from the answer's head what comes: the rest of the image, or all of it because it is another one."""
        try:
            num_bytes = int(answer.headers.get(NUM_BYTES) or answer.headers["content-length"])
            tag = answer.headers["etag"]
        except (KeyError, ValueError) as error:
            raise WeightTransferFailed(f"the server does not say what it sends: {error!r}") from error
        if answer.status_code == httpx.codes.PARTIAL_CONTENT and self._image is not None and tag == self._tag:
            return self._image
        await self.close()
        self._image = await create_image(num_bytes, directory=self._directory, is_partial=True)
        self._tag = tag
        self.num_received = 0
        return self._image

    def _write(self, image: WeightImage, chunk: bytes) -> None:
        end = self.num_received + len(chunk)
        if end > image.image_bytes:
            raise WeightTransferFailed(f"the server sent more than the {image.image_bytes} bytes that it announced")
        image.view[self.num_received : end] = chunk
        self.num_received = end
