"""Finds an image that another process of this host has in shared memory: it is mapped there, and no byte is pulled.

The holders of the image are asked where it is, and answer only callers that see the same shared memory. What is found
proves nothing yet: the mapper locks it against writers, and computes its checksum.
"""

import asyncio
import logging
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from flotilla.shared.errors import FlotillaError
from flotilla.shared.net.authorisation.tokens import Credentials
from flotilla.shared.net.client.bearer_client import tls_context
from flotilla.shared.net.client.client import problem_to_error
from flotilla.shared.schemas.service import ServiceKind
from flotilla.shared.weights.image.files import PREFIX, SHARED_MEMORY, SUFFIX, shared_memory_identity

log = logging.getLogger(__name__)

SEES = "flotilla-shared-memory"
"""Header of a caller that can map the image, with the identity of the shared memory that it sees."""
IMAGE = "flotilla-image"
"""Header of the answer with the image's name there, and no body."""
LOCATE_SECONDS = 2.0
"""A holder that does not answer within it is busy, or on another host: the image is pulled."""

_NAME = re.compile(rf"{PREFIX}\d+-[0-9a-f]+\{SUFFIX}")


@dataclass(frozen=True, slots=True)
class LocatedImage:
    """An image as its holder names it."""

    path: Path
    image_bytes: int
    checksum: str


class ImageLocator:
    """Asks the sources of an image whether they have it in the shared memory that this process sees.

    Args:
        credentials: what the sources are shown.
        transport: how to reach them; None for real connections.
    """

    def __init__(self, credentials: Credentials, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._credentials = credentials
        self._transport = transport

    async def __call__(self, url: str | None, checksum: str | None, peers: Sequence[str] = ()) -> LocatedImage | None:
        """Find an image; None if no service on this host has it.

        Args:
            url: of the version at the trainer; None does not ask it.
            checksum: of the image; None trusts the trainer and uses no other source.
            peers: urls of the version at rollouts.
        """
        identity = shared_memory_identity()
        if identity is None:
            return None
        sources = [] if url is None else [(url, ServiceKind.TRAINER)]
        if checksum is not None:
            sources += [(each, ServiceKind.ROLLOUT) for each in peers]
        timeout = httpx.Timeout(LOCATE_SECONDS)
        async with httpx.AsyncClient(
            timeout=timeout, transport=self._transport, trust_env=False, verify=tls_context()
        ) as client:
            asking = [asyncio.create_task(self._ask(client, *each, identity, checksum)) for each in sources]
            try:
                for answered in asyncio.as_completed(asking, timeout=LOCATE_SECONDS):
                    if (located := await answered) is not None:
                        return located
            except TimeoutError:
                pass
            finally:
                for each in asking:
                    each.cancel()
                await asyncio.gather(*asking, return_exceptions=True)
        return None

    async def _ask(
        self, client: httpx.AsyncClient, url: str, kind: ServiceKind, identity: str, checksum: str | None
    ) -> LocatedImage | None:
        token = self._credentials.for_peer(kind)
        # A service that does not know the question sends one byte.
        headers = {"Authorization": f"Bearer {token}", "Range": "bytes=0-0", SEES: identity}
        try:
            async with client.stream("GET", url, headers=headers) as answer:
                if not answer.is_success:
                    raise problem_to_error(answer.status_code, await answer.aread())
                return _located(answer, checksum)
        except (httpx.HTTPError, FlotillaError) as error:
            log.debug("image cannot be located", extra={"source": url, "cause": repr(error)})
            return None


def _located(answer: httpx.Response, checksum: str | None) -> LocatedImage | None:
    name, tag = answer.headers.get(IMAGE), answer.headers.get("etag", "").strip('"')
    if name is None or not tag or checksum not in {None, tag}:
        return None
    # A name and not a path: nothing else of this machine can be named.
    if _NAME.fullmatch(name) is None:
        return None
    path = SHARED_MEMORY / name
    try:
        status = path.lstat()
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        return None
    return LocatedImage(path, status.st_size, tag)
