"""A server in memory behind a real port: its owner may kill it and start it again, and its answers may break off."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import httpx

HOST = "127.0.0.1"


class Port:
    """Listens, and answers with whatever server is behind it now.

    Attributes:
        server: that answers; None: connections are refused.
        before: called with each request's path before it is answered.
        breaks: paths whose next answer ends after half of its bytes.
    """

    def __init__(self) -> None:
        self.server: httpx.AsyncBaseTransport | None = None
        self.before: Callable[[str], None] = lambda path: None
        self.breaks: list[str] = []
        self.number = 0
        self._listening: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{HOST}:{self.number}"

    async def start(self, server: httpx.AsyncBaseTransport) -> None:
        """Start a server, at the same port as the one before."""
        self.server = server
        self._listening = await asyncio.start_server(self._serve, HOST, self.number)
        self.number = self._listening.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """End the server as SIGKILL does: its connections are reset, and nobody listens."""
        assert self._listening is not None
        self._listening.close()
        self.server = None
        for writer in list(self._connections):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    await self._answer(reader, writer)
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, target, _ = head[0].split(" ")
        headers = dict(line.split(": ", 1) for line in head[1:] if line)
        content = await reader.readexactly(int(headers.get("Content-Length", headers.get("content-length", 0))))
        path = target.partition("?")[0]
        self.before(path)
        # A server that is replaced while it samples takes its requests with it.
        server = self.server
        request = httpx.Request(method, f"{self.url}{target}", headers=headers, content=content)
        try:
            assert server is not None
            response = await server.handle_async_request(request)
        except (httpx.TransportError, AssertionError):
            response = None
        if response is None or server is not self.server:
            writer.transport.abort()
            raise ConnectionResetError
        body = await response.aread()
        kind = response.headers.get("content-type", "text/plain")
        start = f"HTTP/1.1 {response.status_code} X\r\nContent-Length: {len(body)}\r\nContent-Type: {kind}\r\n\r\n"
        is_broken = path in self.breaks
        if is_broken:
            self.breaks.remove(path)
        writer.write(start.encode() + (body[: len(body) // 2] if is_broken else body))
        await writer.drain()
        if is_broken:
            writer.close()
            raise ConnectionResetError


@asynccontextmanager
async def served(server: httpx.AsyncBaseTransport) -> AsyncIterator[Port]:
    """Serve while the block runs."""
    port = Port()
    await port.start(server)
    try:
        yield port
    finally:
        await port.kill()
