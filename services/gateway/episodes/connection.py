"""HTTP connections to rollouts on which answers are passed on as they come.

An agent waits for every request twice, at the gateway and at the rollout, so what the gateway adds is kept small: a
general client takes seven times the processor for the same bytes, and seventy times where 64 agents ask at a time
(``python -m benchmarks.connections``).

A connection is used again only at the boundary of messages: its request was sent and its answer received, both whole,
all of the answer was passed on, and nothing came behind it. Any other is closed, so what one agent leaves unread is
never read by another. One that was idle for longer than the other side may keep it is not used again either.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, cast
from urllib.parse import urlsplit

import httptools

from flotilla.shared.errors import Unavailable
from flotilla.shared.net.client.bearer_client import tls_context

CONNECT_SECONDS: Final = 5.0
KEPT_OPEN_SECONDS: Final = 2.0
"""Less than the other side keeps an idle connection, so that none is used while it is being closed."""
MOST_BUFFERED_BYTES: Final = 256 * 1024
JSON: Final = b"application/json"
FINAL_STATUS: Final = 200
"""Answers below it are followed by another."""


class Connection(asyncio.Protocol):
    """One connection. Its failures are a ``ConnectionError`` of the waiter."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._head: asyncio.Future[None] = loop.create_future()
        self._changed = asyncio.Event()
        self._pieces: deque[bytes] = deque()
        self._buffered = 0
        self._is_answering = False
        self._is_lost = False
        self.status = 0
        self.content_type = JSON
        self.idle_since = 0.0
        self._parser = httptools.HttpResponseParser(self)

    @property
    def is_usable(self) -> bool:
        """Whether another request may be sent on it."""
        return self._is_at_boundary and time.monotonic() - self.idle_since < KEPT_OPEN_SECONDS

    @property
    def _is_at_boundary(self) -> bool:
        if self._is_lost or self._transport is None or self._transport.is_closing():
            return False
        return not (self._is_answering or self._pieces or self._transport.get_write_buffer_size())

    def send(self, head: bytes, body: bytes) -> None:
        """Send a request.

        Raises:
            ConnectionError: it is closed, or not at the boundary of messages.
        """
        if not self._is_at_boundary or self._transport is None:
            raise ConnectionError("the connection is closed")
        self._head = asyncio.get_running_loop().create_future()
        self._is_answering, self.status, self.content_type = True, 0, JSON
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(head + body)

    async def head(self) -> None:
        """Wait for status and headers."""
        await self._head

    async def pieces(self) -> AsyncIterator[bytes]:
        """Iterate over the body."""
        while True:
            while self._pieces:
                piece = self._pieces.popleft()
                self._buffered -= len(piece)
                if self._transport is not None and self._buffered < MOST_BUFFERED_BYTES:
                    self._transport.resume_reading()
                yield piece
            if not self._is_answering:
                return
            if self._is_lost:
                raise ConnectionError("the answer broke off")
            self._changed.clear()
            await self._changed.wait()

    def close(self) -> None:
        """Close it, whatever is under way."""
        self._is_lost = True
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.Protocol``."""
        # Of the gateway's loop, uvloop, which is no subclass of asyncio's.
        self._transport, self.idle_since = cast(asyncio.Transport, transport), time.monotonic()

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        if not self._is_answering:
            self.close()  # nothing was asked: whatever it is, it must not be taken for the next answer
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._break_off("what came is no answer")

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``asyncio.Protocol``."""
        self._break_off(f"the connection was closed: {exc or 'without an answer'}")

    def _break_off(self, reason: str) -> None:
        self.close()
        if not self._head.done():
            self._head.set_exception(ConnectionError(reason))
            # Perhaps nothing awaits it: that is not an error.
            self._head.exception()
        self._changed.set()

    def on_message_begin(self) -> None:
        """See ``httptools``."""
        if not self._is_answering:
            self.close()  # a second answer to one request
            return
        self.content_type = JSON

    def on_header(self, name: bytes, value: bytes) -> None:
        """See ``httptools``."""
        if self._is_answering and not self.status and name.lower() == b"content-type":
            self.content_type = value

    def on_headers_complete(self) -> None:
        """See ``httptools``."""
        status = self._parser.get_status_code()
        if not self._is_answering or status < FINAL_STATUS:
            return  # an interim answer, such as 103: another follows
        self.status = status
        if not self._head.done():
            self._head.set_result(None)

    def on_body(self, body: bytes) -> None:
        """See ``httptools``."""
        if not self._is_answering:
            return
        self._pieces.append(body)
        self._buffered += len(body)
        if self._transport is not None and self._buffered >= MOST_BUFFERED_BYTES:
            self._transport.pause_reading()
        self._changed.set()

    def on_message_complete(self) -> None:
        """See ``httptools``."""
        if not self._is_answering or not self.status:
            return
        self._is_answering, self.idle_since = False, time.monotonic()
        if not self._parser.should_keep_alive():
            self.close()
        self._changed.set()


class Connections:
    """Keeps connections by address."""

    def __init__(self) -> None:
        self._idle: dict[str, list[Connection]] = {}

    @asynccontextmanager
    async def posted(self, address: str, path: str, body: bytes, headers: str) -> AsyncIterator[Connection]:
        """Send a request and wait for the head of its answer; the connection is closed unless the body was passed on.

        Args:
            address: base URL, ``http://HOST:PORT``.
            headers: lines that each end with CR and LF.

        Raises:
            Unavailable: there is no connection, or it broke off.
        """
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {urlsplit(address).netloc}\r\n{headers}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode("latin-1")
        connection: Connection | None = None
        try:
            connection = self._kept(address) or await self._opened(address)
            connection.send(head, body)
            await connection.head()
            yield connection
        except (OSError, TimeoutError) as error:
            raise Unavailable(f"{address} cannot be reached: {error or type(error).__name__}") from error
        finally:
            if connection is not None:
                if connection.is_usable:
                    self._idle.setdefault(address, []).append(connection)
                else:
                    connection.close()

    def close(self) -> None:
        """Close those that are idle."""
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()

    def _kept(self, address: str) -> Connection | None:
        kept = self._idle.get(address, [])
        while kept:
            connection = kept.pop()
            if connection.is_usable:
                return connection
            connection.close()
        self._forget_unusable()
        return None

    def _forget_unusable(self) -> None:
        """Close what was idle for too long, also of rollouts that are gone."""
        for address, connections in list(self._idle.items()):
            usable = [each for each in connections if each.is_usable]
            for connection in set(connections).difference(usable):
                connection.close()
            if usable:
                self._idle[address] = usable
            else:
                del self._idle[address]

    async def _opened(self, address: str) -> Connection:
        url = urlsplit(address)
        async with asyncio.timeout(CONNECT_SECONDS):
            _, connection = await asyncio.get_running_loop().create_connection(
                Connection, url.hostname or "", url.port or 80, ssl=tls_context() if url.scheme == "https" else None
            )
        return connection
