"""Faults of a service's HTTP interface: requests that are slow, refused, or accepted and never answered."""

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from flotilla.shared.errors import FlotillaError, Unavailable
from flotilla.shared.faults.injector import Injector
from flotilla.shared.faults.sites import Kind, Site


class FaultyApp:
    """ASGI middleware around everything else, so that a request which is refused has changed nothing.

    Args:
        app: what it is around.
        faults: of the process.
        answer: makes the response of an error.
    """

    def __init__(self, app: ASGIApp, faults: Injector, answer: Callable[[FlotillaError], ASGIApp]) -> None:
        self._app = app
        self._faults = faults
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http":
            try:
                rest = await self._faults.reach(Site.HTTP_REQUEST, path=scope["path"])
            except Unavailable as error:
                await self._answer(error)(scope, receive, send)
                return
            if any(fault.kind is Kind.HALF_OPEN for fault in rest):
                # Only the caller's timeout ends the request.
                while (await receive())["type"] != "http.disconnect":
                    pass
                return
        await self._app(scope, receive, send)
