"""HTTP connections to rollouts on which answers are passed on as they come.

An agent waits for every request twice, at the gateway and at the rollout, so what the gateway adds is kept small: a
general client takes ten times as long for the same bytes. One request is under way on a connection at a time; a
connection that was idle for longer than the other side may keep it is not used again.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import urlsplit

import httptools

from shared.errors import Unavailable

CONNECT_SECONDS: Final = 5.0
KEPT_OPEN_SECONDS: Final = 2.0
"""Less than the other side keeps an idle connection, so that none is used while it is being closed."""
MOST_BUFFERED_BYTES: Final = 256 * 1024
JSON: Final = b"application/json"


class Connection(asyncio.Protocol):
    """One connection. What goes wrong with it is a ``ConnectionError`` of whoever waits."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._head: asyncio.Future[None] = loop.create_future()
        self._changed = asyncio.Event()
        self._pieces: deque[bytes] = deque()
        self._buffered = 0
        self._is_whole = False
        self._is_lost = False
        self.status = 0
        self.content_type = JSON
        self.idle_since = 0.0
        self._parser = httptools.HttpResponseParser(self)

    @property
    def is_usable(self) -> bool:
        """Whether another request may be sent on it."""
        is_idle_for = time.monotonic() - self.idle_since
        return self._is_whole and not self._is_lost and is_idle_for < KEPT_OPEN_SECONDS

    def send(self, head: bytes, body: bytes) -> None:
        """Send a request."""
        if self._is_lost or self._transport is None:
            raise ConnectionError("the connection is closed")
        self._head = asyncio.get_running_loop().create_future()
        self._is_whole, self.status, self.content_type = False, 0, JSON
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
            if self._is_whole:
                return
            if self._is_lost:
                raise ConnectionError("the answer broke off")
            self._changed.clear()
            await self._changed.wait()

    def close(self) -> None:
        """Close it, whatever is under way."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.Protocol``."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()
            self.connection_lost(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``asyncio.Protocol``."""
        self._is_lost = True
        if not self._head.done():
            self._head.set_exception(ConnectionError(f"the connection was closed: {exc or 'without an answer'}"))
            # Nobody may be waiting: then it is no error either.
            self._head.exception()
        self._changed.set()

    def on_header(self, name: bytes, value: bytes) -> None:
        """See ``httptools``."""
        if name.lower() == b"content-type":
            self.content_type = value

    def on_headers_complete(self) -> None:
        """See ``httptools``."""
        self.status = self._parser.get_status_code()
        if not self._head.done():
            self._head.set_result(None)

    def on_body(self, body: bytes) -> None:
        """See ``httptools``."""
        self._pieces.append(body)
        self._buffered += len(body)
        if self._transport is not None and self._buffered >= MOST_BUFFERED_BYTES:
            self._transport.pause_reading()
        self._changed.set()

    def on_message_complete(self) -> None:
        """See ``httptools``."""
        self._is_whole, self.idle_since = True, time.monotonic()
        if not self._parser.should_keep_alive():
            self.close()
            self._is_lost = True
        self._changed.set()


class Connections:
    """Keeps connections by address."""

    def __init__(self) -> None:
        self._idle: dict[str, list[Connection]] = {}

    @asynccontextmanager
    async def posted(self, address: str, path: str, body: bytes, headers: str) -> AsyncIterator[Connection]:
        """Send a request and wait for the head of its answer; the connection is closed unless the body was read.

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
        return None

    async def _opened(self, address: str) -> Connection:
        url = urlsplit(address)
        async with asyncio.timeout(CONNECT_SECONDS):
            _, connection = await asyncio.get_running_loop().create_connection(
                Connection, url.hostname or "", url.port or 80, ssl=True if url.scheme == "https" else None
            )
        return connection
