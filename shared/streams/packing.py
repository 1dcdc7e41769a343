"""Connections that put commands together in C.

redis-py's asyncio connections join the parts of a command in Python, which takes longer than the server does for an
entry of a few kilobytes; its blocking connections use hiredis, and so do these.
"""

from collections.abc import Iterable
from typing import Any

import hiredis
from redis.asyncio import Connection, SSLConnection, UnixDomainSocketConnection


class _Packing:
    def pack_command(self, *arguments: Any) -> list[bytes]:
        """Put one command together; its name may be of several words."""
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
