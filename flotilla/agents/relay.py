"""The way from a box without a network to one address: connections inside are passed on outside, byte by byte.

Inside listens a small program on a port of the box's own loopback; outside this process, on a socket of the file system
that both see. TLS is spoken outside, so that what is in the box needs no authority's certificate.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from flotilla.shared.net.client.bearer_client import tls_context

PORT: Final = 47080
"""Inside; every box has all ports to itself."""
SOCKET: Final = "socket"
CONNECT_SECONDS: Final = 10.0
MOST_BYTES: Final = 64 * 1024
MOST_CONNECTIONS: Final = 32
"""Of one box at a time: each holds two of this process's descriptors, which other boxes need too. Further ones wait."""

INSIDE: Final = f"""
import os, socket, sys, threading

def pump(source, target):
    try:
        while True:
            piece = source.recv({MOST_BYTES})
            if not piece:
                break
            target.sendall(piece)
    except OSError:
        pass
    try:
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass

listening = socket.create_server(("127.0.0.1", {PORT}), backlog=128)
if os.fork():
    os._exit(0)
os.setsid()
while True:
    inner, _ = listening.accept()
    outer = socket.socket(socket.AF_UNIX)
    try:
        outer.connect(sys.argv[1])
    except OSError:
        inner.close()
        continue
    for pair in ((inner, outer), (outer, inner)):
        threading.Thread(target=pump, args=pair, daemon=True).start()
"""
"""Python's standard library alone; it returns as soon as it listens."""


def url_inside(url: str) -> str:
    """Return what an address outside is called inside."""
    return f"http://127.0.0.1:{PORT}{urlsplit(url).path}"


@asynccontextmanager
async def relaying(folder: Path, url: str) -> AsyncIterator[None]:
    """Pass on what comes to the socket in a folder to the host and port of an address."""
    with socket.socket(socket.AF_UNIX) as listening:
        descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # A socket's own path may have 107 bytes.
            listening.bind(f"/proc/self/fd/{descriptor}/{SOCKET}")
        finally:
            os.close(descriptor)
        listening.listen(128)
        listening.setblocking(False)
        serving = asyncio.create_task(_serve(listening, url))
        try:
            yield
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


async def _serve(listening: socket.socket, url: str) -> None:
    parts = urlsplit(url)
    secure = tls_context() if parts.scheme == "https" else None
    port = parts.port or (443 if secure else 80)
    places = asyncio.Semaphore(MOST_CONNECTIONS)

    async def answer(accepted: socket.socket) -> None:
        try:
            reader, writer = await asyncio.open_unix_connection(sock=accepted)
        except OSError:
            accepted.close()
            return
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                from_there, to_there = await asyncio.open_connection(parts.hostname, port, ssl=secure)
            try:
                await asyncio.gather(_pump(reader, to_there), _pump(from_there, writer))
            finally:
                to_there.close()
        except OSError:
            pass  # the caller sees its connection end
        finally:
            writer.close()

    async with asyncio.TaskGroup() as connections:
        while True:
            await places.acquire()
            accepted, _ = await asyncio.get_running_loop().sock_accept(listening)
            connections.create_task(answer(accepted)).add_done_callback(lambda _: places.release())


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(MOST_BYTES):
            writer.write(piece)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
        else:
            # TLS has no half-close: the caller has gone, and an answer would be sampled in vain.
            writer.close()
