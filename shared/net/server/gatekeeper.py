"""Checks before a route: requests without a valid token use neither processor time nor memory of the service."""

from collections.abc import Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from flotilla.shared.errors import FlotillaError, TooManyRefused, Unauthorized
from flotilla.shared.net.authorisation.tokens import Credentials
from flotilla.shared.net.server.connections import REFUSED_OFTEN, connection_of
from flotilla.shared.net.server.limits import BodyLimit
from flotilla.shared.net.server.model_api_problems import problem_at
from flotilla.shared.net.server.request_body import Bodies, BodyBrokenOff, replay

READING = {"GET", "HEAD"}


async def refuse(scope: Scope, receive: Receive, send: Send, error: FlotillaError, *, is_counted: bool = True) -> None:
    """Answer a request with a problem; one that no token lets in counts, and after too many the answer is 429.

    Args:
        scope, receive, send: of the request.
        error: what is wrong.
        is_counted: whether a request without a token that is let in counts; where not, it is never one too many.
    """
    headers: Mapping[str, str] = {}
    if isinstance(error, Unauthorized):
        connection = connection_of(scope) if is_counted else None
        seconds = 0 if connection is None else connection.refused()
        headers = {"Retry-After": str(seconds), "Connection": "close"} if seconds else {"WWW-Authenticate": "Bearer"}
        error = TooManyRefused(f"{REFUSED_OFTEN}: {error.detail}") if seconds else error
    response = problem_at(scope["path"], error)
    response.headers.update(headers)
    await response(scope, receive, send)


class Gatekeeper:
    """Demands the bearer token of every request that does not only read, and bounds the body, before reading it.

    Args:
        app: what stands behind.
        credentials: the accepted tokens.
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
                await refuse(scope, receive, send, error)
                return
            await self._app(scope, replay(body, receive), send)
