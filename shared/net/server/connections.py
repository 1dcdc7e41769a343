"""HTTP connections: bounded, read in turn, answered in one piece; they notice when their caller has gone.

Nothing of a request is the caller's to draw out: each head and each body has a deadline from its first byte on, an
answer must be read, and one address cannot take all connections.

One change that is answered to a thousand waiting callers makes all of them call again at once. Handled as they come,
their calls fill one turn of the loop after another, and other callers wait for the last of them. What comes on a
connection that was answered by such a call is therefore kept until its turn comes, a few in each turn of the loop:
another call is handled with the next few of them.
"""

import asyncio
import contextlib
import json
import logging
import socket
from collections import Counter, deque
from enum import Enum, auto
from http import HTTPStatus
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from flotilla.shared.errors import (
    FlotillaError,
    HeadersTooLarge,
    RequestTooSlow,
    TooManyRefused,
    Unavailable,
    UnreadableRequest,
)
from flotilla.shared.net.server.limits import ConnectionLimits, Strangers

log = logging.getLogger(__name__)

READ_AT_ONCE = 8
"""Connections whose calls are handled in one turn of the loop: about a millisecond of work."""
KEPT_BYTES = 64 * 1024
"""A connection that has sent so much before its turn comes is not read until then."""
EXTENSION = "flotilla.connection"
REFUSED_OFTEN = "too many requests from your address were refused"


class Turns:
    """Lets connections continue, a few in each turn of the loop, in the order in which they were given."""

    def __init__(self, at_once: int = READ_AT_ONCE) -> None:
        self._at_once = at_once
        self._waiting: deque[Connection] = deque()

    def take(self, connection: "Connection") -> None:
        """Let a connection continue when its turn comes."""
        self._waiting.append(connection)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        try:
            for _ in range(min(self._at_once, len(self._waiting))):
                self._waiting.popleft().go_on()
        finally:
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._next)


class HeadWithBody:
    """What one response is written to: its head is sent together with the beginning of its body.

    Written apart, each is a call of the system, and wakes the caller. A head whose body takes longer is sent alone.
    """

    __slots__ = ("_head", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head: bytes | None = b""

    def write(self, data: bytes) -> None:
        """Send, or keep the first piece until the next one, or the next turn of the loop."""
        if self._head == b"":
            self._head = data
            asyncio.get_running_loop().call_soon(self._flush)
        elif self._head is not None:
            head, self._head = self._head, None
            self._transport.write(head + data)
        else:
            self._transport.write(data)

    def _flush(self) -> None:
        head, self._head = self._head, None
        if head:
            self._transport.write(head)

    def is_closing(self) -> bool:
        """Whether the connection is closed or about to be."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Close the connection once all is sent."""
        self._flush()
        self._transport.close()


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
    strangers: Strangers
    _lost: asyncio.Future[None] | None = None
    _is_lost = _is_watched = False
    _part = _Part.NONE
    _head_bytes = _headers_bytes = 0
    _deadline: asyncio.TimerHandle | None = None
    _deadline_of = _Part.NONE
    _stall: asyncio.TimerHandle | None = None
    _address: str | None = None
    _waits_for_turn = False
    _kept = b""

    @property
    def lost(self) -> asyncio.Future[None]:
        """Ends when the connection does. All requests share it: do not cancel it."""
        if self._lost is None:
            self._lost = asyncio.get_running_loop().create_future()
            if self._is_lost:
                self._lost.set_result(None)
        return self._lost

    def watched(self) -> asyncio.Future[None]:
        """Return ``lost`` to a request that waits before it answers, and notice a host that disappears meanwhile.

        The limit of what is unread would keep the kernel from it: where there is one, its probes end nothing before.
        """
        self._limit_unread(0.0)
        self._is_watched = True
        return self.lost

    def on_response_complete(self) -> None:
        """Bound again how long nothing of an answer may be read."""
        if self._is_watched:
            self._is_watched = False
            self._limit_unread(self.limits.unread_seconds)
        super().on_response_complete()

    def _limit_unread(self, seconds: float) -> None:
        """Bound how long the kernel keeps the last of an answer that is not read; 0: not at all."""
        accepted: socket.socket | None = self.transport.get_extra_info("socket")
        if accepted is not None and accepted.family in {socket.AF_INET, socket.AF_INET6}:
            with contextlib.suppress(OSError):  # closed meanwhile
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))

    def refused(self) -> int:
        """Count a request that is refused for want of a token; returns how long its address is to wait, in seconds.

        More than 0: there were too many, and the answer is 429.
        """
        return 0 if self._address is None else self.strangers.refused(self._address)

    def read_in_turn(self) -> None:
        """Handle the next request only when its turn comes; call it once a request is answered."""
        self._waits_for_turn = True

    def go_on(self) -> None:
        """Handle what came meanwhile: it is this connection's turn."""
        kept, self._kept, self._waits_for_turn = self._kept, b"", False
        if self._is_lost or not kept:
            return
        if len(kept) >= KEPT_BYTES:
            self.transport.resume_reading()
        self._handle(kept)

    def data_received(self, data: bytes) -> None:
        """Handle what came, or keep it."""
        if not self._waits_for_turn:
            self._handle(data)
            return
        if not self._kept:
            self._unset_keepalive_if_required()  # it is not idle, however long its turn takes
            self.turns.take(self)
        self._kept += data
        if len(self._kept) >= KEPT_BYTES:
            self.transport.pause_reading()

    def eof_received(self) -> None:
        """Handle what was sent before the end."""
        self.go_on()
        super().eof_received()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin; a caller with too many connections is closed, and a silent one soon."""
        super().connection_made(transport)
        self._limit_unread(self.limits.unread_seconds)
        self._address = self.client[0] if self.client else None
        if self._address is not None:
            self.by_address[self._address] += 1
            if self.by_address[self._address] > self.limits.per_address:
                log.warning("an address has too many connections", extra={"address": self._address})
                self._refuse(Unavailable(f"one address may have {self.limits.per_address} connections"))
                return
        self._arm(_Part.HEAD)

    def _handle(self, data: bytes) -> None:
        """Read what came, and bound the time until the rest of it does."""
        if self.transport.is_closing():
            return
        if self._part is _Part.HEAD:
            self._head_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._part is _Part.HEAD and self._head_bytes > self.limits.head_bytes:
            self._refuse_stranger(HeadersTooLarge(self._largest_head))
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

    def on_url(self, url: bytes) -> None:
        """Take a piece of the path, if there is room for it."""
        self._headers_bytes += len(url)
        if self._headers_bytes > self.limits.head_bytes:
            raise _HeadTooLarge
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, if there is room for it."""
        self._headers_bytes += len(name) + len(value)
        if self._headers_bytes > self.limits.head_bytes or len(self.headers) >= self.limits.headers:
            raise _HeadTooLarge
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin the request, whose response is sent in one piece."""
        self._part = _Part.BODY
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            # It writes, closes, and asks whether that was done, nothing else.
            self.cycle.transport = HeadWithBody(self.transport)  # type: ignore[assignment]

    def on_message_complete(self) -> None:
        """Note that all of the request is there."""
        self._part = _Part.NONE
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what cannot be read."""
        too_large = self._headers_bytes > self.limits.head_bytes or len(self.headers or ()) >= self.limits.headers
        if too_large:
            self._refuse_stranger(HeadersTooLarge(self._largest_head))
        else:
            self._refuse_stranger(UnreadableRequest(msg))

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
        """Wake its waiters."""
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
        self._refuse(RequestTooSlow(f"the {what} of the request did not arrive in time"))

    def _unread(self) -> None:
        log.info("a caller does not read its answer", extra={"address": self._address})
        self.transport.abort()

    def _refuse_stranger(self, error: FlotillaError) -> None:
        """Refuse what no Flotilla client sends; if repeated, with a short answer."""
        seconds = self.refused()
        if seconds:
            self._refuse(TooManyRefused(REFUSED_OFTEN), f"retry-after: {seconds}\r\n")
        else:
            self._refuse(error)

    def _refuse(self, error: FlotillaError, headers: str = "") -> None:
        """Answer, unless an answer is under way, and close."""
        is_busy = self.cycle is not None and (self.cycle.response_started and not self.cycle.response_complete)
        if not is_busy:
            facts = {"title": error.title, "status": error.status, "code": error.code, "detail": error.detail}
            body = json.dumps({"type": f"urn:flotilla:problem:{error.code}", **facts}).encode()
            head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
            head += "content-type: application/problem+json\r\n"
            head += f"{headers}content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        if self.cycle is not None:
            # Whatever it sends from now on is discarded.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()


def connection_of(scope: Scope) -> Connection | None:
    """Find the connection of a request; None where there is none, as in memory."""
    extension: dict[str, Connection] = scope.get("extensions", {}).get(EXTENSION, {})
    return extension.get("connection")


def _is_told(record: logging.LogRecord) -> bool:
    """Return whether a log line of the server is kept: malformed requests are not logged one by one."""
    return record.msg != "Invalid HTTP request received."


def connections(limits: ConnectionLimits) -> type[asyncio.Protocol]:
    """Make the protocol of one server, whose connections take turns with each other."""
    logging.getLogger("uvicorn.error").addFilter(_is_told)
    strangers = Strangers(limits.refusals, limits.refusals_per_second)
    own: dict[str, Any] = {"turns": Turns(), "limits": limits, "by_address": Counter(), "strangers": strangers}
    return type("ServerConnection", (Connection,), own)
