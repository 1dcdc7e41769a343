"""Calls to a server over HTTP, and what its refusals say.

A server that cannot be reached, or breaks off, raises ``Unreachable``: its supervisor knows whether it is dead.
"""

import json
from collections.abc import Mapping
from typing import Any

import httpx

from flotilla.shared.errors import DeadlineExceeded, FlotillaError
from flotilla.shared.net.client.bearer_client import bearer_client

Body = Mapping[str, Any]
MAX_DETAIL = 400
PASSING = frozenset({408, 425, 429})
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0)
"""Servers close idle connections after five seconds: a request on one that it is just closing would fail."""


class Unreachable(Exception):
    """The connection failed or ended before the reply."""


class Refused(FlotillaError):
    """The server answered with an error.

    Attributes:
        answered: its HTTP status.
    """

    def __init__(self, detail: str, answered: int) -> None:
        super().__init__(detail)
        self.answered = answered

    @property
    def passes(self) -> bool:
        """Whether the same call may be answered later: the server is busy, loads, or a proxy does not reach it."""
        return self.answered >= 500 or self.answered in PASSING


class ServerClient:
    """Speaks with one server.

    Args:
        url: of the server.
        key: its API key; None if it has none.
        name: of this kind of server, for messages.
        transport: another one than sockets, for tests.
    """

    def __init__(self, url: str, key: str | None, name: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._name = name
        self._http = bearer_client(url, key, limits=LIMITS, transport=transport)

    async def close(self) -> None:
        """Close all connections, whatever still waits on them."""
        await self._http.aclose()

    async def post(self, path: str, body: Body | None, *, seconds: float | None) -> Any:
        """Call an endpoint.

        Args:
            path: of the endpoint.
            body: sent as JSON; None sends none.
            seconds: deadline; None waits as long as the server takes, which is for sampling alone.

        Returns:
            The reply's JSON, or None if it is empty.

        Raises:
            Refused: the server said no.
            Unreachable: it did not answer.
            DeadlineExceeded: it did not answer in time.
        """
        return await self._request("POST", path, body, seconds)

    async def get(self, path: str, *, seconds: float) -> Any:
        """Read an endpoint; see ``post``."""
        return await self._request("GET", path, None, seconds)

    async def _request(self, method: str, path: str, body: Body | None, seconds: float | None) -> Any:
        timeout = httpx.Timeout(seconds)
        try:
            reply = await self._http.request(method, path, json=body, timeout=timeout)
        except httpx.TimeoutException:
            raise DeadlineExceeded(f"the {self._name} server did not answer {path} within {seconds} s") from None
        except httpx.RequestError as error:
            raise Unreachable(f"{path}: {type(error).__name__} {error}".rstrip()) from error
        if not reply.is_success:
            why = reason_of(reply.text)
            raise Refused(f"the {self._name} server answers {path} with {reply.status_code}: {why}", reply.status_code)
        try:
            return reply.json() if reply.content else None
        except ValueError:
            return reply.text


def reason_of(text: str) -> str:
    """Find the message in any of the shapes that the server's errors have."""
    try:
        body = json.loads(text)
    except ValueError:
        body = text
    for key in ("error", "message", "detail"):
        if isinstance(body, dict) and body.get(key):
            body = body[key]
    # Messages about fields continue with the server's own source lines.
    return str(body).split("\n\n  File ")[0][:MAX_DETAIL]
