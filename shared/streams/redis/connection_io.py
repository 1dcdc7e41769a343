"""Connections that put commands together in C, and send large ones without copying them.

redis-py's asyncio connections join the parts of a command in Python, which takes longer than the server does for an
entry of a few kilobytes; its blocking connections use hiredis, and so do these. A large argument it copies three times
on its way: into the command, into one string with the other commands, and what the socket does not take at once into
the transport's buffer. Here it goes to the socket in pieces that the socket takes, as it is.
"""

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any, Final

import hiredis
from redis.asyncio import Connection, SSLConnection, UnixDomainSocketConnection

LARGE_BYTES: Final = 32 * 1024
"""An argument of this size or more is not copied."""
PIECE_BYTES: Final = 128 * 1024
"""Somewhat less than a socket's buffer holds."""


class WriterInPieces:
    """Stands in for a connection's stream writer: hands large messages to it piece by piece.

    What ``writelines`` was given is written by ``drain``, which redis-py calls right after it.
    """

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._chunks: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def writelines(self, chunks: Iterable[bytes]) -> None:
        """Keep the parts of a message until ``drain``."""
        self._chunks.extend(chunks)

    async def drain(self) -> None:
        """Write what was kept, waiting until the socket has taken nearly all of it."""
        chunks, self._chunks = self._chunks, []
        for piece in _pieces(chunks):
            self._writer.write(piece)
            await self._writer.drain()


def _pieces(chunks: Iterable[bytes]) -> Iterator[bytes | memoryview]:
    """Join small chunks and cut large ones."""
    small: list[bytes] = []
    for chunk in chunks:
        if len(chunk) < LARGE_BYTES:
            small.append(chunk)
            continue
        if small:
            yield b"".join(small)
            small = []
        view = memoryview(chunk)
        for start in range(0, len(chunk), PIECE_BYTES):
            yield view[start : start + PIECE_BYTES]
    if small:
        yield b"".join(small)


class _Packing:
    _writer: Any

    async def _connect(self) -> None:
        await super()._connect()  # type: ignore[misc]
        self._writer = WriterInPieces(self._writer)

    def pack_command(self, *arguments: Any) -> list[bytes]:
        """Put one command together; its name may be of several words. Large arguments stand alone in the result."""
        if any(isinstance(each, bytes) and len(each) >= LARGE_BYTES for each in arguments):
            chunks: list[bytes] = super().pack_command(*arguments)  # type: ignore[misc]
            return chunks
        name, *others = arguments
        words = name.split() if isinstance(name, str | bytes) and len(name) else [name]
        packed: bytes = hiredis.pack_command((*words, *others))
        return [packed]

    def pack_commands(self, commands: Iterable[Iterable[Any]]) -> list[bytes]:
        """Put the commands of a pipeline together."""
        return [packed for command in commands for packed in self.pack_command(*command)]


class PackingConnection(_Packing, Connection):
    """Over TCP."""


class PackingSSLConnection(_Packing, SSLConnection):
    """Over TLS."""


class PackingUnixConnection(_Packing, UnixDomainSocketConnection):
    """Over a unix socket."""


PACKING: dict[type, type] = {
    Connection: PackingConnection,
    SSLConnection: PackingSSLConnection,
    UnixDomainSocketConnection: PackingUnixConnection,
}
"""redis-py's connection -> ours."""
