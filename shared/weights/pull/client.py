"""Weights over HTTP, the client's side: an image in ranges, from several sources at once, within one deadline.

Sources are the trainer, rollouts that have the image, and a directory where it is kept. Over HTTP each range comes over
a plain connection where the source offers one and it can be reached, else as the answer's body. What arrives is written
to a file that is published only once it is complete and verified.

What ends each wait: a source that cannot be reached by ``CONNECT_SECONDS``; one that sends nothing by
``SILENCE_SECONDS``, or by ``STALL_SECONDS`` as soon as another source has nothing else to do; all by the caller's
deadline. A source that offers another image, or whose bytes turn out wrong, is not asked again.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx

from flotilla.shared.concurrency.cancelling import to_the_end
from flotilla.shared.errors import DeadlineExceeded, FlotillaError, NotFound, Unavailable, WeightTransferFailed
from flotilla.shared.net.authorisation.tokens import Credentials
from flotilla.shared.net.client.bearer_client import tls_context
from flotilla.shared.net.retry import Backoff, retry
from flotilla.shared.schemas.service import ServiceKind
from flotilla.shared.weights.pull.http_source import CONNECT_SECONDS, HttpSource
from flotilla.shared.weights.pull.kept_images import DirectorySource, kept_path
from flotilla.shared.weights.pull.source import (
    SILENCE_SECONDS,
    STALLED_BYTES,
    ArrivingImage,
    OnArrived,
    Reuse,
    Source,
)

log = logging.getLogger(__name__)

CONNECTIONS = 2
"""To each source: while one range is asked for, another one comes."""
STALL_SECONDS = 2.0
SPARE_SECONDS = 4.0
"""A source beside which there is only a spare one may send next to nothing for so long."""
LOOK_SECONDS = 0.25
TELL_SECONDS = 0.02
"""How often progress of the image is reported: as much as arrives meanwhile is read after the last byte."""
MAX_STRIKES = 2
"""A source that fails so often in a row, without a byte in between, is left for the others."""


class WeightPuller:
    """Fetches images from ``weights_router``s.

    Args:
        credentials: what the sources are shown.
        transport: how to reach them; None for real connections.
    """

    def __init__(self, credentials: Credentials, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._credentials = credentials
        self._transport = transport

    async def __call__(
        self,
        url: str | None,
        version: int,
        directory: Path | None,
        deadline_seconds: float,
        *,
        checksum: str | None = None,
        peers: Sequence[str] = (),
        kept_in: Path | None = None,
        reuse: Reuse | None = None,
        on_arrived: OnArrived | None = None,
    ) -> Path:
        """Fetch a version into a file, which is the caller's to remove; it is named so that ``sweep`` knows it.

        Args:
            url: of this version at the trainer, such as ``http://host:port/v1/weights/3``; None while there is none.
            version: what the url names, for messages.
            directory: where the file goes; None chooses shared memory where there is room.
            deadline_seconds: for all attempts together.
            checksum: of the image; None trusts the trainer and uses no other source.
            peers: urls of this version at rollouts.
            kept_in: where images are kept that everybody sees.
            reuse: lends an image that is written in the place of a new file, if there is one; see ``Reuse``.
            on_arrived: called with the bytes received; for another file it starts again, and the earlier ones are void.

        Raises:
            NotFound: no source offers the version.
            Unauthorized: the token is wrong.
            WeightTransferFailed: what arrived is not what it should be, or there is no room for it.
            Unavailable: no source could be reached, or all broke off, until the deadline.
            DeadlineExceeded: they were still sending at the deadline.
        """
        client = self._client()
        sources: list[Source] = []
        if checksum is not None:
            sources += [self._source(client, each, ServiceKind.ROLLOUT) for each in peers]
            sources += [] if kept_in is None else [DirectorySource(kept_path(kept_in, version, checksum), checksum)]
        if url is not None:
            sources.append(self._source(client, url, ServiceKind.TRAINER))
        if not sources:
            raise NotFound(f"no source serves version {version} now")
        pull = _Pull(sources, lambda: ArrivingImage(directory, checksum, reuse, on_arrived))
        return await self._run(pull, client, version, deadline_seconds)

    async def relayed(
        self,
        sources: Sequence[str],
        version: int,
        deadline_seconds: float,
        *,
        checksum: str,
        image_bytes: int,
        reuse: Reuse | None = None,
    ) -> Path:
        """Fetch a version from a rollout that passes it on, and from the trainer only if that one fails or stalls.

        Args:
            sources: url of this version at the rollout, if any, and at the trainer.
            version: what the urls name, for messages.
            deadline_seconds: for all attempts together.
            checksum, image_bytes: of the image: no memory is taken for one of another size.
            reuse: as of ``__call__``, with its errors.
        """
        client = self._client()
        *peers, url = sources
        origin = self._source(client, url, ServiceKind.TRAINER)
        rollouts: list[Source] = [self._source(client, each, ServiceKind.ROLLOUT) for each in peers]
        spare = origin if rollouts else None
        pull = _Pull(rollouts or [origin], lambda: ArrivingImage(None, checksum, reuse, image_bytes=image_bytes), spare)
        return await self._run(pull, client, version, deadline_seconds)

    async def _run(self, pull: "_Pull", client: httpx.AsyncClient, version: int, deadline_seconds: float) -> Path:
        try:
            async with asyncio.timeout(deadline_seconds), client:
                return await pull.run(version)
        except TimeoutError:
            if pull.last is not None:
                raise pull.last from None
            raise DeadlineExceeded(f"pulling version {version} took more than {deadline_seconds} s") from None
        finally:
            await pull.close()

    def _client(self) -> httpx.AsyncClient:
        timeout = httpx.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS)
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(
            timeout=timeout, limits=limits, transport=self._transport, trust_env=False, verify=tls_context()
        )

    def _source(self, client: httpx.AsyncClient, url: str, kind: ServiceKind) -> HttpSource:
        token = self._credentials.for_peer(kind)
        # A ticket is worth as much as the token was: it is not shown where HTTP would have been encrypted.
        may_be_direct = self._transport is None and url.startswith("http://")
        return HttpSource(client, url, token, may_be_direct, is_origin=kind is ServiceKind.TRAINER)


class _Pull:
    """One version on its way from several sources.

    Args:
        sources: that are asked.
        make: makes the image that they are written into.
        spare: is asked as well once the others have failed or stalled.
    """

    def __init__(self, sources: list[Source], make: Callable[[], ArrivingImage], spare: Source | None = None) -> None:
        self._sources = sources
        self._make = make
        self._spare = spare
        self._image: ArrivingImage | None = None
        self._finished: Path | None = None
        self.last: Unavailable | None = None

    async def run(self, version: int) -> Path:
        """Fetch it from all sources at once; if what came is wrong, one by one, to find the corrupt one."""
        try:
            path = await self._from(self._sources, version)
        except WeightTransferFailed:
            self._take_spare(self._sources)
            if len(self._sources) == 1:
                raise
            path = await self._one_by_one(version)
        self._finished = None
        return path

    async def close(self) -> None:
        """Remove what the caller does not have."""
        await self._drop()
        if self._finished is not None:
            self._finished.unlink(missing_ok=True)

    async def _one_by_one(self, version: int) -> Path:
        failure: FlotillaError | None = None
        for source in reversed(self._sources):  # the trainer first
            await self._drop()
            # It may have been excluded because of another source's description of the image.
            source.strikes, source.failure = 0, None
            try:
                return await self._from([source], version, is_patient=False)
            except FlotillaError as error:
                log.warning("source of weights is left", extra={"source": source.url, "error": error.detail})
                failure = error
        assert failure is not None
        raise failure

    async def _from(self, sources: list[Source], version: int, *, is_patient: bool = True) -> Path:
        backoff = Backoff()

        async def attempt() -> Path:
            before = 0 if self._image is None else self._image.num_received
            try:
                await self._go_on(sources)
            except Unavailable as error:
                self.last = error
                if self._image is not None and self._image.num_received > before:
                    backoff.reset()
                raise
            return await self._finish()

        return await retry(
            attempt,
            waiting_for=f"weights of version {version}",
            backoff=backoff,
            is_retryable=lambda error: is_patient and isinstance(error, Unavailable),
            level=logging.DEBUG,
        )

    async def _go_on(self, sources: list[Source]) -> None:
        """Fetch what is missing, until it is there or every source was left.

        Raises:
            FlotillaError: of the last source that was left; ``Unavailable`` if any may be asked again.
        """
        if self._image is None:
            self._image = self._make()
        image = self._image
        for source in sources:
            if isinstance(source.failure, Unavailable):
                source.strikes, source.failure = 0, None
        async with asyncio.TaskGroup() as beside:
            telling = beside.create_task(_tell(image), name="progress of arriving weights")
            async with asyncio.TaskGroup() as tasks:
                fetching = _begin(tasks, image, *sources)
                if self._spare is not None:
                    tasks.create_task(self._call_on_spare(image, sources, fetching, tasks))
            telling.cancel()
        if not image.missing.is_whole:
            if image.is_replaced:
                await self._drop()
            if image.is_disputed:
                raise WeightTransferFailed("the trainer's image has another size than another source had said")
            failures = [source.failure for source in sources if source.failure is not None]
            raise next((each for each in failures if isinstance(each, Unavailable)), failures[-1])

    async def _call_on_spare(
        self,
        image: ArrivingImage,
        sources: list[Source],
        fetching: Sequence[asyncio.Task[None]],
        tasks: asyncio.TaskGroup,
    ) -> None:
        """Ask the spare source as well once the others have failed, or next to nothing comes from them."""
        num, since = 0, time.monotonic()
        while (await asyncio.wait(fetching, timeout=LOOK_SECONDS))[1]:
            now = time.monotonic()
            if image.num_arrived - num >= STALLED_BYTES:
                num, since = image.num_arrived, now
            elif now - since >= SPARE_SECONDS:
                break
        if not (image.missing.is_whole or image.is_disputed):
            _begin(tasks, image, *self._take_spare(sources))

    def _take_spare(self, sources: list[Source]) -> list[Source]:
        """Make the spare source one of the others; gives it, once."""
        taken = [] if self._spare is None else [self._spare]
        sources += taken
        self._spare = None
        return taken

    async def _finish(self) -> Path:
        assert self._image is not None
        await self._image.settled()
        finishing = asyncio.ensure_future(asyncio.to_thread(self._image.finish))
        try:
            path = await to_the_end(finishing)
        except asyncio.CancelledError:
            # The thread has ended: the file is removed after it.
            self._finished = finishing.result() if finishing.exception() is None else None
            raise
        self._finished, self._image = path, None
        return path

    async def _drop(self) -> None:
        if self._image is not None:
            await self._image.close()
        self._image = None


def _begin(tasks: asyncio.TaskGroup, image: ArrivingImage, *sources: Source) -> list[asyncio.Task[None]]:
    """Begin to fetch from sources. Not one failure ends the others: they share what is missing."""
    return [tasks.create_task(_fetch(image, source)) for source in sources for _ in range(CONNECTIONS)]


async def _tell(image: ArrivingImage) -> None:
    while True:
        await asyncio.sleep(TELL_SECONDS)
        image.tell()


async def _fetch(image: ArrivingImage, source: Source) -> None:
    """Fetch ranges from a source, one connection each, until nothing is missing or the source is left."""
    while (span := await image.next_range(source, LOOK_SECONDS, STALL_SECONDS)) is not None:
        try:
            await image.take(source, span)
        except Unavailable as error:
            source.strikes += not image.is_resting(source)
            if source.strikes >= MAX_STRIKES or image.is_replaced:
                source.failure = source.failure or error
        except FlotillaError as error:
            log.info("source of weights is left", extra={"source": source.url, "error": error.detail})
            source.failure = error
        image.notify()
