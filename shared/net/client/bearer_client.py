"""HTTP clients that show a token, for any peer; the environment's proxies and passwords are ignored."""

import os
import ssl
from functools import cache

import httpx

from flotilla.shared.environment.tls import tls_from
from flotilla.shared.net.dead_peers import SOCKET_OPTIONS


@cache
def tls_context() -> ssl.SSLContext:
    """Read the certificate authorities once in a process: it takes as long as forty requests.

    Raises:
        InvalidRequest: ``FLOTILLA_TLS_*`` name what is none.
    """
    return tls_from(os.environ).add_to(httpx.create_ssl_context(trust_env=False))


def bearer_client(
    base_url: str, token: str | None, *, limits: httpx.Limits, transport: httpx.AsyncBaseTransport | None = None
) -> httpx.AsyncClient:
    """Make a client of one server.

    Args:
        base_url: of the server.
        token: that requests show; None shows none.
        limits: of its connections.
        transport: another one than sockets.
    """
    sockets = transport or httpx.AsyncHTTPTransport(
        limits=limits, verify=tls_context(), trust_env=False, socket_options=SOCKET_OPTIONS
    )
    return httpx.AsyncClient(
        base_url=base_url,
        headers={"Authorization": f"Bearer {token}"} if token else {},
        transport=sockets,
        trust_env=False,
    )
