"""HTTP connections that know when their caller is gone, and that are read again in turn.

One change that is answered to a thousand waiting callers makes all of them call again at once. Read as they come, their
calls fill one turn of the loop after another, and whoever else calls waits for the last of them. A connection that
was answered by such a call is therefore not read until its turn comes, a few in each turn of the loop: the calls wait
in the sockets, and another call is read with the next few of them.
"""

import asyncio
from collections import deque

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

READ_AT_ONCE = 16
"""Connections that are read again in one turn of the loop: some milliseconds of work."""
EXTENSION = "flotilla.connection"


class Turns:
    """Lets connections be read again, a few in each turn of the loop, in the order in which they were given."""

    def __init__(self, at_once: int = READ_AT_ONCE) -> None:
        self._at_once = at_once
        self._waiting: deque[asyncio.Transport] = deque()

    def take(self, transport: asyncio.Transport) -> None:
        """Stop reading a connection until its turn comes."""
        if transport.is_closing():
            return
        transport.pause_reading()
        self._waiting.append(transport)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        for _ in range(min(self._at_once, len(self._waiting))):
            self._waiting.popleft().resume_reading()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)


class Connection(HttpToolsProtocol):
    """uvicorn's protocol of one connection, which its requests find as an extension of their scope."""

    turns: Turns
    _lost: asyncio.Future[None] | None = None
    _is_lost = False

    @property
    def lost(self) -> asyncio.Future[None]:
        """Ends when the connection does. All requests share it: do not cancel it."""
        if self._lost is None:
            self._lost = asyncio.get_running_loop().create_future()
            if self._is_lost:
                self._lost.set_result(None)
        return self._lost

    def read_in_turn(self) -> None:
        """Read the next request only when its turn comes; call it once a request is answered."""
        self.turns.take(self.transport)

    def on_message_begin(self) -> None:
        """Offer this connection to the request that begins."""
        super().on_message_begin()
        self.scope["extensions"] = {EXTENSION: {"connection": self}}

    def connection_lost(self, exc: Exception | None) -> None:
        """Let those know who wait for it."""
        self._is_lost = True
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(None)
        super().connection_lost(exc)


def connection_of(scope: Scope) -> Connection | None:
    """Find the connection of a request; None where there is none, as in memory."""
    extension: dict[str, Connection] = scope.get("extensions", {}).get(EXTENSION, {})
    return extension.get("connection")


def connections() -> type[asyncio.Protocol]:
    """Make the protocol of one server, whose connections take turns with each other."""
    return type("ServerConnection", (Connection,), {"turns": Turns()})
