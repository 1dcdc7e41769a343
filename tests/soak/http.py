"""The HTTP of a soak: a grader's server, and a client."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import httpx


async def serve(answer: Callable[[str, bytes], bytes]) -> asyncio.Server:
    """Serve on a free port of the loopback interface: ``answer`` is given the path and the body of each request."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError, ValueError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            lengths = [line.partition(":")[2] for line in head if line.lower().startswith("content-length:")]
            body = await reader.readexactly(int(lengths[0]))
            content = answer(head[0].split()[1], body)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n")
            writer.write(f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
            await writer.drain()
        writer.close()

    return await asyncio.start_server(handle, "127.0.0.1", 0)


def new_client() -> httpx.AsyncClient:
    """Make a client that asks whom it is told to, and waits as long as it takes."""
    return httpx.AsyncClient(follow_redirects=False, trust_env=False, timeout=None)
