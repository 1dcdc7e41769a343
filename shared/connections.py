"""HTTP connections that are bounded, know when their caller is gone, and are read again in turn.

Nothing of a request is the caller's to draw out: each head and each body has a deadline from its first byte on, an
answer must be read, and one address cannot take all connections.

One change that is answered to a thousand waiting callers makes all of them call again at once. Read as they come, their
calls fill one turn of the loop after another, and whoever else calls waits for the last of them. A connection that
was answered by such a call is therefore not read until its turn comes, a few in each turn of the loop: the calls wait
in the sockets, and another call is read with the next few of them.
"""

import asyncio
import json
import logging
import socket
from collections import Counter, deque
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

log = logging.getLogger(__name__)

READ_AT_ONCE = 16
"""Connections that are read again in one turn of the loop: some milliseconds of work."""
EXTENSION = "flotilla.connection"
TITLES = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


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


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What one connection may take of a server.

    Attributes:
        connections: at a time; requests on further ones are answered 503.
        per_address: of them, from one address; further ones are closed.
        head_bytes, headers: of one request.
        head_seconds: from the connection, or the first byte of a further request, to the end of its head.
        body_seconds: from there to the end of its body.
        idle_seconds: between two requests.
        unread_seconds: how long nothing of an answer may be read.
    """

    connections: int = 4096
    per_address: int = 3072
    head_bytes: int = 64 * 1024
    headers: int = 128
    head_seconds: float = 10.0
    body_seconds: float = 60.0
    idle_seconds: int = 5
    unread_seconds: float = 60.0


class _Part(Enum):
    """Which part of a request comes next."""

    NONE = auto()
    HEAD = auto()
    BODY = auto()


class _HeadTooLarge(Exception):
    """A head has more bytes or headers than are read."""


class Connection(HttpToolsProtocol):
    """uvicorn's protocol of one connection, which its requests find as an extension of their scope."""

    turns: Turns
    limits: ConnectionLimits
    by_address: Counter[str]
    _lost: asyncio.Future[None] | None = None
    _is_lost = False
    _part = _Part.NONE
    _head_bytes = _headers_bytes = 0
    _deadline: asyncio.TimerHandle | None = None
    _deadline_of = _Part.NONE
    _stall: asyncio.TimerHandle | None = None
    _address: str | None = None

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

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin; who has too many connections is closed, and who says nothing is, soon."""
        super().connection_made(transport)
        accepted: socket.socket | None = transport.get_extra_info("socket")
        if accepted is not None and accepted.family in {socket.AF_INET, socket.AF_INET6}:
            # The last of an answer is with the kernel only: it gives up where nobody takes it.
            milliseconds = int(self.limits.unread_seconds * 1000)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        self._address = self.client[0] if self.client else None
        if self._address is not None:
            self.by_address[self._address] += 1
            if self.by_address[self._address] > self.limits.per_address:
                log.warning("an address has too many connections", extra={"address": self._address})
                self._refuse(503, f"one address may have {self.limits.per_address} connections")
                return
        self._arm(_Part.HEAD)

    def data_received(self, data: bytes) -> None:
        """Read what came, and bound the time until the rest of it does."""
        if self.transport.is_closing():
            return
        if self._part is _Part.HEAD:
            self._head_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._part is _Part.HEAD and self._head_bytes > self.limits.head_bytes:
            self._refuse(431, self._largest_head)
        elif self._part is not _Part.NONE:
            self._arm(self._part)
        elif self.cycle is None or self.cycle.response_complete:
            self._arm(_Part.HEAD)  # nothing but empty lines: no request has begun
        else:
            self._disarm()

    def on_message_begin(self) -> None:
        """Offer this connection to the request that begins."""
        self._part = _Part.HEAD
        self._head_bytes = self._headers_bytes = 0
        super().on_message_begin()
        self.scope["extensions"] = {EXTENSION: {"connection": self}}

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, if there is room for it."""
        self._headers_bytes += len(name) + len(value)
        if self._headers_bytes > self.limits.head_bytes or len(self.headers) >= self.limits.headers:
            raise _HeadTooLarge
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin the request."""
        self._part = _Part.BODY
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Note that all of the request is there."""
        self._part = _Part.NONE
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what cannot be read."""
        too_large = self._headers_bytes > self.limits.head_bytes or len(self.headers or ()) >= self.limits.headers
        if too_large:
            self._refuse(431, self._largest_head)
        else:
            self._refuse(400, msg)

    def pause_writing(self) -> None:
        """Begin to count the time in which nothing of an answer is read."""
        super().pause_writing()
        self._stall = self.loop.call_later(self.limits.unread_seconds, self._unread)

    def resume_writing(self) -> None:
        """Note that some of it was read."""
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Let those know who wait for it."""
        self._is_lost = True
        self._disarm()
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(None)
        if self._address is not None:
            self.by_address[self._address] -= 1
            if not self.by_address[self._address]:
                del self.by_address[self._address]
        super().connection_lost(exc)

    @property
    def _largest_head(self) -> str:
        return f"a request has {self.limits.headers} headers and {self.limits.head_bytes} bytes of them at most"

    def _arm(self, part: _Part) -> None:
        if self._deadline is not None and self._deadline_of is part:
            return
        self._disarm()
        seconds = self.limits.head_seconds if part is _Part.HEAD else self.limits.body_seconds
        self._deadline, self._deadline_of = self.loop.call_later(seconds, self._late), part

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        part, self._deadline = self._deadline_of, None
        if self.flow.read_paused:
            self._arm(part)  # what was sent waits for us
            return
        what = "head" if part is _Part.HEAD else "body"
        log.info("a caller took too long", extra={"part": what, "address": self._address})
        self._refuse(408, f"the {what} of the request did not arrive in time")

    def _unread(self) -> None:
        log.info("a caller does not read its answer", extra={"address": self._address})
        self.transport.abort()

    def _refuse(self, status: int, detail: str) -> None:
        """Answer, unless an answer is under way, and close."""
        is_busy = self.cycle is not None and (self.cycle.response_started and not self.cycle.response_complete)
        if not is_busy:
            title = TITLES[status]
            problem = {"type": "about:blank", "title": title, "status": status, "detail": detail}
            body = json.dumps(problem).encode()
            head = f"HTTP/1.1 {status} {title}\r\ncontent-type: application/problem+json\r\n"
            head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        if self.cycle is not None:
            # Whatever it says from now on is for nobody.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()


def connection_of(scope: Scope) -> Connection | None:
    """Find the connection of a request; None where there is none, as in memory."""
    extension: dict[str, Connection] = scope.get("extensions", {}).get(EXTENSION, {})
    return extension.get("connection")


def connections(limits: ConnectionLimits) -> type[asyncio.Protocol]:
    """Make the protocol of one server, whose connections take turns with each other."""
    own: dict[str, Any] = {"turns": Turns(), "limits": limits, "by_address": Counter()}
    return type("ServerConnection", (Connection,), own)
