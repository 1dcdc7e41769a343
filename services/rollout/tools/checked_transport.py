"""Where the URLs of tools may lead: each name is resolved once, checked, and connected to at that address."""

from collections.abc import Sequence

import httpx

from shared.address_policy import AddressRefused, permitted_address
from shared.errors import EpisodeFailed
from shared.settings import GRADER_NETWORKS, IPNetwork

PORTS = {"http": 80, "https": 443}


async def checked_address(url: httpx.URL, networks: Sequence[IPNetwork]) -> str:
    """Resolve a URL's host and choose the address to connect to.

    Raises:
        EpisodeFailed: one of its addresses is neither public nor in ``networks``.
        OSError: the name cannot be resolved.
    """
    host = url.raw_host.decode()
    try:
        return await permitted_address(host, url.port or PORTS[url.scheme], private=networks)
    except AddressRefused:
        raise EpisodeFailed(
            f"the tool's host {host} is neither public nor in a network of the rollouts' {GRADER_NETWORKS}"
        ) from None


class CheckedAddresses(httpx.AsyncHTTPTransport):
    """Connects to public addresses only, and to the networks that the operator has named.

    Args:
        networks: those.
    """

    def __init__(self, networks: Sequence[IPNetwork]) -> None:
        super().__init__(trust_env=False)
        self._networks = networks

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request to the address that was checked, under the name that it was made with."""
        try:
            address = await checked_address(request.url, self._networks)
        except (OSError, UnicodeError) as error:
            raise httpx.ConnectError(str(error), request=request) from error
        request.extensions = {**request.extensions, "sni_hostname": request.url.raw_host.decode()}
        request.url = request.url.copy_with(host=address)
        return await super().handle_async_request(request)
