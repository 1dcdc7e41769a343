"""The status call, answered without the web framework.

Every service makes this call all the time, and one change of an experiment is answered to all of its services at once:
with a thousand of them, what one call costs is what the last of them waits for. The framework's routing, dependencies
and responses are most of that cost. So an ordinary call is answered here, behind the same guard as every other; one
that is not (another content type, a body or query that is not valid) goes on to the route of ``routes/services.py``,
which does the same and says what is wrong.
"""

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flotilla.services.gateway.membership.fleet import WatchCaller
from flotilla.services.gateway.state import GatewayState
from flotilla.shared.errors import FlotillaError
from flotilla.shared.net.server.connections import connection_of
from flotilla.shared.net.server.serving import problem_response
from flotilla.shared.schemas.service import ObservedState

JSON = "application/json"
PATH = re.compile(r"/v1/services/([^/]+)/status")
QUERY = re.compile(rb"(?:wait=([0-9]{1,9}(?:\.[0-9]{1,9})?))?")
CONTENT_TYPE = (b"content-type", JSON.encode())


async def exchange(
    gateway: GatewayState, service_id: str, observed: ObservedState, wait_seconds: float, watch: WatchCaller
) -> bytes:
    """Record an observation, wait for the desired state, and return it as JSON.

    Raises:
        NotFound: the service is not registered.
    """
    wait_seconds = min(wait_seconds, gateway.settings.longest_wait_seconds)
    return gateway.fleet.bodies.of(await gateway.fleet.report(service_id, observed, wait_seconds, watch))


@contextmanager
def watching(receive: Receive) -> Iterator[WatchCaller]:
    """Watch for the caller to hang up by a request whose body was read: that is what comes next."""
    tasks: list[asyncio.Future[Any]] = []

    async def hang_up() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    def watch() -> asyncio.Future[Any]:
        tasks.append(asyncio.ensure_future(hang_up()))
        return tasks[-1]

    try:
        yield watch
    finally:
        for task in tasks:
            task.cancel()


class StatusCalls:
    """ASGI middleware: answers ordinary status calls, passes on all else.

    Args:
        app: where the rest goes.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        path = PATH.fullmatch(scope["path"]) if scope["type"] == "http" and scope["method"] == "PUT" else None
        query = QUERY.fullmatch(scope["query_string"]) if path is not None else None
        if path is None or query is None or CONTENT_TYPE not in scope["headers"]:
            await self._app(scope, receive, send)
            return
        # The guard has read all of the body, and gives it in one piece.
        message = await receive()
        try:
            observed = ObservedState.model_validate_json(message.get("body", b""))
        except ValidationError:
            await self._app(scope, again(message, receive), send)
            return
        wait_seconds, connection = float(query[1] or 0), connection_of(scope)
        try:
            asked = (scope["state"]["gateway"], path[1], observed, wait_seconds)
            if connection is None:
                with watching(receive) as watch:
                    body = await exchange(*asked, watch)
            else:
                # Without a task for each of a thousand waiting calls.
                body = await exchange(*asked, connection.watched)
        except FlotillaError as error:
            await problem_response(error)(scope, receive, send)
            return
        headers = [CONTENT_TYPE, (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        if connection is not None and wait_seconds > 0:
            connection.read_in_turn()


def again(message: Message, receive: Receive) -> Receive:
    """Replay a message that was read already, then whatever comes next."""
    read: list[Message] = [message]

    async def replay() -> Message:
        return read.pop() if read else await receive()

    return replay
