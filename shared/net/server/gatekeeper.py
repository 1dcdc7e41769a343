"""Checks before a route: requests without a valid token use neither processor time nor memory of the service."""

from collections.abc import Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from flotilla.shared.errors import FlotillaError, TooManyRefused, Unauthorized
from flotilla.shared.net.authorisation.credentials import Credentials
from flotilla.shared.net.server.connections import REFUSED_OFTEN, connection_of
from flotilla.shared.net.server.request_body import Bodies, BodyBrokenOff, BodyLimit, replay
from flotilla.shared.net.server.serving import problem_response

READING = {"GET", "HEAD"}


def refusal_of(
    scope: Scope, error: Unauthorized, *, is_counted: bool = True
) -> tuple[FlotillaError, Mapping[str, str]]:
    """Refuse a request that no token lets in; returns the error, or another one if there were too many, and headers.

    Args:
        scope: of the request.
        error: what is wrong.
        is_counted: whether it counts; where it does not, it is never one too many.
    """
    connection = connection_of(scope) if is_counted else None
    seconds = 0 if connection is None else connection.refused()
    if not seconds:
        return error, {"WWW-Authenticate": "Bearer"}
    return TooManyRefused(f"{REFUSED_OFTEN}: {error.detail}"), {"Retry-After": str(seconds), "Connection": "close"}


class Gatekeeper:
    """Demands the bearer token of every request that does not only read, and bounds the body, before reading it.

    Args:
        app: what stands behind.
        credentials: who is let in.
        max_bytes: largest body.
    """

    def __init__(self, app: ASGIApp, *, credentials: Credentials, max_bytes: int) -> None:
        self._app = app
        self._credentials = credentials
        self._limit = BodyLimit(max_bytes)
        self._bodies = Bodies()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it with a problem."""
        if scope["type"] != "http" or scope["method"] in READING:
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        with self._bodies.hold() as held:
            try:
                authorization = headers.get(b"authorization", b"").decode("latin-1")
                if not self._credentials.accepts(authorization):
                    raise Unauthorized("this call needs the header `Authorization: Bearer TOKEN` with the right token")
                body = await held.read(headers.get(b"content-length", b""), receive, self._limit)
            except BodyBrokenOff:
                return
            except FlotillaError as error:
                more: Mapping[str, str] = {}
                if isinstance(error, Unauthorized):
                    error, more = refusal_of(scope, error)
                response = problem_response(error)
                response.headers.update(more)
                await response(scope, receive, send)
                return
            await self._app(scope, replay(body, receive), send)
