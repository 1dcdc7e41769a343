"""A relay before a server that can swallow one answer, as a broken connection does, or make one that never comes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

CHUNK_BYTES = 1 << 16


class Relay:
    """Passes bytes between clients and a server's unix socket."""

    def __init__(self, server_path: str) -> None:
        self._server_path = server_path
        self._needle: bytes | None = None
        self._is_cut = True
        self._released = asyncio.Event()
        self._released.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.swallowed = 0

    def lead_to(self, server_path: str) -> None:
        """Connect clients that come from now on to another server."""
        self._server_path = server_path

    def swallow_answer_to(self, needle: bytes) -> None:
        """Let the next request that holds these bytes reach the server, and cut its connection before the answer."""
        self._needle, self._is_cut = needle, True

    def withhold_answer_to(self, needle: bytes) -> None:
        """Let the next request that holds these bytes reach the server, and its answer nobody: the client waits."""
        self._needle, self._is_cut = needle, False

    def hold_back(self, needle: bytes) -> None:
        """Keep the next request that holds these bytes until ``release``; its answer reaches nobody."""
        self.withhold_answer_to(needle)
        self._released.clear()

    def release(self) -> None:
        """Let the request that is kept reach the server, though its client may have gone."""
        self._released.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_unix_connection(self._server_path)
        self._writers |= {writer, server_writer}
        is_doomed = asyncio.Event()

        async def upwards() -> None:
            while data := await reader.read(CHUNK_BYTES):
                if self._needle is not None and self._needle in data:
                    self._needle = None
                    is_doomed.set()
                    await self._released.wait()
                server_writer.write(data)
                await server_writer.drain()

        async def downwards() -> None:
            while data := await server_reader.read(CHUNK_BYTES):
                if is_doomed.is_set():
                    self.swallowed += 1
                    if self._is_cut:
                        return
                    continue
                writer.write(data)
                await writer.drain()

        tasks = [asyncio.create_task(upwards()), asyncio.create_task(downwards())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for each in (writer, server_writer):
                each.close()
                with contextlib.suppress(OSError):
                    await each.wait_closed()

    async def wait_closed(self) -> None:
        for writer in self._writers:
            writer.close()
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def relaying(url: str, path: Path) -> AsyncIterator[tuple[Relay, str]]:
    """Relay ``url``; yields the relay, and the url through it."""
    parts = urlsplit(url)
    relay = Relay(parts.path)
    server = await asyncio.start_unix_server(relay.serve, path)
    try:
        yield relay, urlunsplit(parts._replace(netloc=parts.netloc, path=str(path)))
    finally:
        server.close()
        await relay.wait_closed()
