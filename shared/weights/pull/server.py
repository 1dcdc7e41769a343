"""Weights over HTTP, the server's side: the last published images, for late joiners and hosts no collective reaches.

The trainer's service includes ``weights_router``; ``pull_client.WeightPuller`` is the other side. A caller that says
so gets, instead of the bytes, a ticket for a plain connection (``direct``), which is several times as fast; one that
sees the same shared memory gets the image's name there (``locate``).
"""

import asyncio
import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.types import Receive, Scope, Send

from flotilla.shared.errors import FlotillaError, NotFound, Unauthorized, WeightTransferFailed
from flotilla.shared.net.authorisation.tokens import Credentials
from flotilla.shared.net.server.serving import problem_response
from flotilla.shared.weights.image.files import SHARED_MEMORY, shared_memory_identity
from flotilla.shared.weights.image.image import WeightImage
from flotilla.shared.weights.image.off_loop import attach_image, close_images, map_again
from flotilla.shared.weights.mapped.locate import IMAGE, SEES
from flotilla.shared.weights.pull.direct import DirectServer
from flotilla.shared.weights.pull.sender import ProcessSender, RangeSender

CHUNK_BYTES = 1 << 20
SERVE_SECONDS = 600.0
"""A client that takes longer to read one answer is disconnected, so that its lock on the image ends; it can resume."""

WANTS_TICKET = "flotilla-direct"
"""Header of a caller that can take the range over a plain connection."""
TICKET, PORT = "flotilla-ticket", "flotilla-port"
"""Headers of the answer that has such a ticket, and no body."""

_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class PublishedImages:
    """The newest versions that may be pulled.

    Args:
        num_kept: how many versions are offered. Their images must not be written while they are.
    """

    def __init__(self, num_kept: int = 2) -> None:
        if num_kept < 1:
            raise ValueError(f"at least one version must be offered, got {num_kept}")
        self._num_kept = num_kept
        self._images: dict[int, Path | WeightImage] = {}
        self._checksums: dict[int, str] = {}
        self.direct: DirectServer | None = None
        """Sends ranges over plain connections, while it runs."""

    @contextlib.contextmanager
    def served_directly(self, host: str, sender: RangeSender | None = None) -> Iterator[None]:
        """Send ranges over plain connections too, while the block runs; None has a process send them."""
        self.direct = DirectServer(host, sender or ProcessSender())
        try:
            yield
        finally:
            self.direct.close()
            self.direct = None

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions that are offered, oldest first."""
        return tuple(sorted(self._images))

    def publish(self, version: int, image: Path | WeightImage, checksum: str | None = None) -> None:
        """Offer a complete image as this version; the oldest offer ends. A missing checksum is computed when needed.

        One that is mapped is served from its mapping, which must be open as long as it is offered, even when another
        process deletes its file.
        """
        self._images[version] = image
        self._checksums.pop(version, None)
        if checksum is not None:
            self._checksums[version] = checksum
        for old in self.versions[: -self._num_kept]:
            del self._images[old]
            self._checksums.pop(old, None)

    def withdraw(self) -> None:
        """Offer nothing any more: the next experiment counts its versions from 0."""
        self._images.clear()
        self._checksums.clear()

    async def open(self, version: int) -> tuple[WeightImage, str]:
        """Map a version's image, locked against writers until it is closed, and tell its checksum.

        Raises:
            NotFound: the version is not offered, or its image is gone; the detail names those that are.
        """
        offered_image = self._images.get(version)
        image = None
        if offered_image is not None:
            with contextlib.suppress(WeightTransferFailed):
                if isinstance(offered_image, Path):
                    image = await attach_image(offered_image, is_read_whole=False)
                else:
                    image = await map_again(offered_image)
        if image is None:
            offered = ", ".join(str(each) for each in self.versions if each != version) or "none"
            raise NotFound(f"version {version} is not offered; available: {offered}", available=offered)
        try:
            if version not in self._checksums:
                self._checksums[version] = await asyncio.to_thread(image.checksum)
        except BaseException:
            await close_images(image)
            raise
        return image, self._checksums[version]


class ImageResponse(Response):
    """Streams a range of an image, and closes it in any case."""

    def __init__(self, image: WeightImage, span: range, status: int, headers: dict[str, str]) -> None:
        super().__init__(status_code=status, headers=headers, media_type="application/octet-stream")
        self.headers["content-length"] = str(len(span))
        self._image = image
        self._span = span

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Called by the server."""
        try:
            async with asyncio.timeout(SERVE_SECONDS):
                await self._send(send)
        finally:
            await close_images(self._image)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        with self._image.view as view:
            for start in range(self._span.start, self._span.stop, CHUNK_BYTES):
                piece = bytes(view[start : min(start + CHUNK_BYTES, self._span.stop)])
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def weights_router(images: PublishedImages, credentials: Credentials) -> APIRouter:
    """Make the routes that serve images: ``GET /v1/weights/{version}``.

    The answer is a safetensors file; its ``ETag`` is the xxh3-64 of the whole image in quotes. One ``Range`` of bytes
    is honoured, unless ``If-Range`` names another checksum. Errors are problem details: 401, 404 with the versions that
    are available, 416.

    Args:
        images: what is offered.
        credentials: the accepted tokens.
    """
    router = APIRouter(tags=["weights"])

    answers: dict[int | str, dict[str, Any]] = {
        200: {"content": {"application/octet-stream": {}}},
        204: {"description": "The caller sees the image in shared memory, where it has the name in `flotilla-image`."},
        206: {"description": "The range that was asked for.", "content": {"application/octet-stream": {}}},
    }

    @router.get("/v1/weights/{version}", response_class=Response, responses=answers)
    async def weights(version: int, request: Request) -> Response:
        """Serve a version's weights.

        Raises:
            RangeNotSatisfiable: the range begins behind the end.
        """
        try:
            if not credentials.accepts_for_weights(request.headers.get("authorization")):
                raise Unauthorized("a bearer token is needed to pull weights")
            image, checksum = await images.open(version)
        except FlotillaError as error:
            return problem_response(error)
        return await _answer(image, f'"{checksum}"', request, images.direct)

    return router


async def _answer(image: WeightImage, tag: str, request: Request, direct: DirectServer | None) -> Response:
    headers = {"etag": tag, "accept-ranges": "bytes"}
    if SEES in request.headers and _is_seen_by(request.headers[SEES], image):
        headers[IMAGE] = image.path.name
        await close_images(image)
        return Response(status_code=204, headers=headers)
    size = image.image_bytes
    found = _RANGE.fullmatch(request.headers.get("range", ""))
    if found is None or request.headers.get("if-range", tag) != tag:
        return _sent(image, range(size), 200, headers, request, direct)
    start, stop = int(found[1]), min(int(found[2]) + 1 if found[2] else size, size)
    if start >= stop:
        await close_images(image)
        problem = problem_response(RangeNotSatisfiable(f"bytes {start} and later of {size} were asked for"))
        problem.headers.update(headers | {"content-range": f"bytes */{size}"})
        return problem
    headers["content-range"] = f"bytes {start}-{stop - 1}/{size}"
    return _sent(image, range(start, stop), 206, headers, request, direct)


def _is_seen_by(identity: str, image: WeightImage) -> bool:
    return image.path.parent == SHARED_MEMORY and not image.is_withdrawn and identity == shared_memory_identity()


def _sent(
    image: WeightImage,
    span: range,
    status: int,
    headers: dict[str, str],
    request: Request,
    direct: DirectServer | None,
) -> Response:
    if direct is None or WANTS_TICKET not in request.headers:
        return ImageResponse(image, span, status, headers)
    ticket = {TICKET: direct.issue(image, span).hex(), PORT: str(direct.port)}
    return Response(status_code=status, headers=headers | ticket)


class RangeNotSatisfiable(FlotillaError):
    """The range begins behind the end of the image."""

    code, title, status = "range_not_satisfiable", "The range cannot be satisfied", 416
