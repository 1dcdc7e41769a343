"""How URLs of specs and of web hooks are reached: each name is resolved once, checked, and connected to there.

Answers of tools are bounded, in bytes and by being what they seem: nothing is unpacked. No redirection is followed, and
where it leads is taken off the answer: a client reads it, and not each address can be read.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import httpx

from flotilla.shared.environment.settings import GRADER_NETWORKS, IPNetwork
from flotilla.shared.net.client.address_policy import AddressRefused, permitted_address
from flotilla.shared.net.client.bearer_client import tls_context
from flotilla.shared.net.client.bounded_json import ReplyTooLong, at_most, is_packed

PORTS = {"http": 80, "https": 443}
MAX_ANSWER_BYTES: Final = 1024 * 1024
EVENTS: Final = "text/event-stream"


async def checked_address(url: Any, networks: Sequence[IPNetwork]) -> str:
    """Resolve a URL's host and choose the address to connect to.

    Raises:
        OSError: the name cannot be resolved, or one of its addresses is neither public nor in ``networks``.
    """
    host = url.raw_host.decode()
    try:
        return await permitted_address(host, url.port or PORTS[url.scheme], private=networks)
    except AddressRefused:
        raise PermissionError(
            f"the host {host} is neither public nor in a network of this service's {GRADER_NETWORKS}"
        ) from None


class CheckedAddresses(httpx.AsyncBaseTransport):
    """Connects to public addresses only, and to the networks that the operator has named.

    Args:
        networks: those.
        library: httpx, or a package's replacement.
        max_answer_bytes: the longest answer that is no stream of events; None bounds none.
        options: of the library's own transport.
    """

    def __init__(
        self,
        networks: Sequence[IPNetwork],
        library: Any = httpx,
        *,
        max_answer_bytes: int | None = MAX_ANSWER_BYTES,
        **options: Any,
    ) -> None:
        self._networks = networks
        self._library = library
        self._max_answer_bytes = max_answer_bytes
        self._inner = library.AsyncHTTPTransport(trust_env=False, verify=tls_context(), **options)

    async def handle_async_request(self, request: Any) -> Any:
        """Send a request to the address that was checked, under the name that it was made with."""
        try:
            address = await checked_address(request.url, self._networks)
        except (OSError, UnicodeError) as error:
            raise self._library.ConnectError(str(error), request=request) from error
        request.extensions = {**request.extensions, "sni_hostname": request.url.raw_host.decode()}
        request.url = request.url.copy_with(host=address)
        request.headers["accept-encoding"] = "identity"
        response = await self._inner.handle_async_request(request)
        if is_packed(response.headers):
            await response.aclose()
            raise self._library.RemoteProtocolError("the answer is compressed, though it must not be", request=request)
        if 300 <= response.status_code < 400:
            response.headers.pop("location", None)
        # Readers bound events: each, not all.
        limit = self._max_answer_bytes
        if limit is not None and not response.headers.get("content-type", "").startswith(EVENTS):
            response.stream = self._bounded(response.stream, request, limit)
        return response

    async def aclose(self) -> None:
        """Close the connections."""
        await self._inner.aclose()

    def _bounded(self, stream: Any, request: Any, limit: int) -> Any:
        library = self._library
        base: Any = library.AsyncByteStream

        class Bounded(base):  # type: ignore[misc]
            async def __aiter__(self) -> AsyncIterator[bytes]:
                try:
                    async for piece in at_most(stream, limit):
                        yield piece
                except ReplyTooLong as error:
                    detail = f"the answer is longer than {limit} bytes"
                    raise library.ReadError(detail, request=request) from error

            async def aclose(self) -> None:
                await stream.aclose()

        return Bounded()


def checked_client(networks: Sequence[IPNetwork], seconds: Any, library: Any = httpx, **options: Any) -> Any:
    """Make a client that follows no redirection, uses no proxy and no password file, and bounds what it is answered."""
    options |= {"trust_env": False, "follow_redirects": False, "timeout": seconds}
    return library.AsyncClient(transport=CheckedAddresses(networks, library), **options)
