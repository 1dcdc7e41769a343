"""Connections to the server: calls outlive its short absences, and large commands are sent without copies.

redis-py's asyncio connections join the parts of a command in Python, which takes longer than the server needs for an
entry of a few kilobytes; its blocking connections use hiredis, and so do these. It copies a large argument three times:
into the command, into one string with the other commands, and what the socket does not take at once into the
transport's buffer. Here it is handed to the socket as it is, in pieces that the socket takes.

Around each command redis-py asks its retries, its telemetry and its listeners, forty calls of which none does anything
for us; here a command is sent and its answer read.
"""

import asyncio
import logging
import math
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import hiredis
from redis.asyncio import Connection, ConnectionPool, Redis, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from flotilla.shared.environment.settings import VOLATILE_REDIS
from flotilla.shared.environment.tls import tls_from
from flotilla.shared.errors import InvalidRequest, Unavailable
from flotilla.shared.net.dead_peers import TCP_OPTIONS
from flotilla.shared.net.retry import retry

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


class PlainPool(ConnectionPool):
    """Gives connections that are ready, as redis-py's pool does."""

    async def get_connection(self, command_name: str | None = None, *keys: Any, **options: Any) -> AbstractConnection:
        """Take one out of the pool, connected, with nothing to read; see ``ConnectionPool.get_connection``."""
        connection = self.get_available_connection()
        try:
            if not await _is_ready(connection):
                await self.ensure_connection(connection)
        except BaseException:
            await self.release(connection)
            raise
        return connection

    async def release(self, connection: AbstractConnection) -> None:
        """Put it back; see ``ConnectionPool.release``."""
        try:
            if connection.should_reconnect():
                await connection.disconnect()
        finally:
            self._in_use_connections.remove(connection)
            self._available_connections.append(connection)


async def _is_ready(connection: AbstractConnection) -> bool:
    try:
        return connection.is_connected and not await connection.can_read()
    except (RedisConnectionError, OSError):
        return False


class PlainRedis(Redis):
    """Sends a command and reads its answer; a connection on which that breaks off closes itself."""

    async def execute_command(self, *arguments: Any, **options: Any) -> Any:
        """See ``Redis.execute_command``."""
        connection = await self.connection_pool.get_connection()
        try:
            await connection.send_command(*arguments)
            return await self.parse_response(connection, arguments[0], **options)
        finally:
            await self.connection_pool.release(connection)


MINIMUM_VERSION = (6, 2)
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 15.0
"""Longest time for one attempt of a command; far above the half second for which one may block."""
COMPONENT = "redis"
"""What ``Unavailable`` names as its ``component`` where the server is meant."""

NO_ANSWER: Final = "no_answer"
"""What ``Unavailable`` names as its ``condition`` where there is none of those below."""
CONDITIONS: Final[Mapping[str, str]] = {
    "OOM": "the memory of the Redis server is full (maxmemory)",
    "MISCONF": "the Redis server cannot write its log: its disk is full, or fails",
    "NOREPLICAS": "too few replicas of the Redis server are connected (min-replicas-to-write)",
    "READONLY": "the Redis server is a read-only replica: after a fail-over, until its address names the primary",
    "MASTERDOWN": "the Redis server is a replica that lost its primary",
    "UNBLOCKED": "the Redis server became a replica",
    "LOADING": "the Redis server reads its log",
    "BUSY": "the Redis server is busy with a script",
    "CLUSTERDOWN": "the Redis cluster is down",
    "TRYAGAIN": "the Redis cluster moves keys",
    "MOVED": "the Redis cluster keeps these keys on another node: give the address of that one, or of a proxy",
    "ASK": "the Redis cluster moves these keys to another node",
    "NOAUTH": "the Redis server refuses the password",
    "WRONGPASS": "the Redis server refuses the password",
    "NOPERM": "the Redis user lacks a permission",
}
"""The server's condition, by the code of its refusal. None of them is about the command."""
CODE: Final = re.compile(rf"(?:^|[\s:'\"-])({'|'.join(CONDITIONS)})\b")
ANNOTATION: Final = "of pipeline caused error: "
CODE_OF: Final[Mapping[type[Exception], str]] = {
    OutOfMemoryError: "OOM",
    ReadOnlyError: "READONLY",
    MasterDownError: "MASTERDOWN",
    BusyLoadingError: "LOADING",
    TryAgainError: "TRYAGAIN",
    MovedError: "MOVED",
    AskError: "ASK",
    ClusterDownError: "CLUSTERDOWN",
    NoPermissionError: "NOPERM",
    AuthenticationError: "NOAUTH",
}
"""Codes that the client takes off the text; a class that inherits from another comes before it."""
MOVED_AWAY: Final = frozenset({"READONLY", "MASTERDOWN", "UNBLOCKED", "CLUSTERDOWN", "MOVED", "ASK"})
"""Conditions after which the address may lead to another server."""

SILENT_GAUGE: Final = "redis_silent_seconds"
"""Gauge of a service's load: for how long Redis has not answered it."""
SHORTEST_SILENCE_SECONDS: Final = 2.0
"""An attempt that ends unanswered before this was abandoned by its caller: no command blocks for so long in the
server."""
_asked_in_vain: "WeakKeyDictionary[Redis, tuple[float, float]]" = WeakKeyDictionary()

Answer = TypeVar("Answer")


def connect(url: str) -> Redis:
    """Open a client for ``redis://``, ``rediss://`` or ``unix://``; it connects at its first command.

    Answers are bytes. The client itself repeats nothing: a repeated command could take effect twice, so that
    is left to callers that know theirs is safe. Nor does it limit the time of a command: with a limit, redis-py sends
    through ``asyncio.wait_for``, which before Python 3.12 loses a cancellation that comes at the same moment. Use
    ``answer_in_time`` around its commands. Close it with ``await client.aclose()``.

    Raises:
        InvalidRequest: it is no such address.
    """
    is_local = url.startswith("unix:")
    keeping = {} if is_local else {"socket_keepalive": True, "socket_keepalive_options": TCP_OPTIONS}
    try:
        pool = PlainPool.from_url(
            url,
            protocol=2,
            decode_responses=False,
            socket_timeout=None,
            socket_connect_timeout=CONNECT_SECONDS,
            socket_read_size=256 * 1024,
            retry=Retry(NoBackoff(), 0),
            **keeping,
            **_certificates(url),
        )
    except ValueError:
        # Not repeated: it may hold a password.
        raise InvalidRequest(
            "the address of a Redis server (FLOTILLA_REDIS_URL) is written redis://[:PASSWORD@]HOST:PORT/DB, "
            "rediss://... or unix://[:PASSWORD@]PATH?db=DB"
        ) from None
    pool.connection_class = PACKING[pool.connection_class]
    return PlainRedis.from_pool(pool)


def _certificates(url: str) -> dict[str, str]:
    """Choose the files for TLS, where the address does not name others (``?ssl_ca_certs=...``)."""
    if urlsplit(url).scheme != "rediss":
        return {}
    tls = tls_from(os.environ)
    named = {"ssl_ca_certs": tls.authority, "ssl_certfile": tls.certificate, "ssl_keyfile": tls.key}
    return {name: str(path) for name, path in named.items() if path is not None and f"{name}=" not in url}


def note_attempt(redis: Redis, *, is_answered: bool, has_failed: bool, began_at: float) -> None:
    """Note how an attempt ended, whichever process made it.

    Args:
        redis: the client.
        is_answered: a refusal is an answer, too.
        has_failed: its connection failed; else whichever process made it may have abandoned it.
        began_at: in seconds of the monotonic clock.
    """
    now = time.monotonic()
    if is_answered:
        _asked_in_vain.pop(redis, None)
    elif has_failed or now - began_at >= SHORTEST_SILENCE_SECONDS:
        since, _ = _asked_in_vain.get(redis, (began_at, now))
        _asked_in_vain[redis] = since, now


def silence(redis: Redis) -> dict[str, float]:
    """Return for how long the server has answered nothing that was asked, as a gauge; empty while it answers."""
    now = time.monotonic()
    since, last = _asked_in_vain.get(redis, (now, -math.inf))
    # A process that asks nothing any more, having lost its experiment meanwhile, knows nothing of the server.
    return {} if now - last > 2 * ANSWER_SECONDS else {SILENT_GAUGE: round(now - since, 3)}


def condition_of(error: Exception) -> str | None:
    """Find the code of the server's condition in its refusal; None for any other error."""
    for kind, code in CODE_OF.items():
        if isinstance(error, kind):
            return code
    if not isinstance(error, ResponseError):
        return None
    # A script's error has the code within a text of the server's own; a pipeline's comes after the command.
    found = CODE.search(str(error).rpartition(ANNOTATION)[2])
    return found[1] if found else None


def is_absence(error: Exception) -> bool:
    """Return whether the server may answer the same command later: it is unavailable, or refuses for now."""
    return isinstance(error, RedisConnectionError | RedisTimeoutError | OSError) or condition_of(error) is not None


def unavailable(error: Exception, deadline_seconds: float) -> Unavailable:
    """Name what holds the server up, and for how long it was waited for."""
    code = condition_of(error)
    if code is None:
        detail = f"the Redis server did not answer within {deadline_seconds:g} s: {error}"
        return Unavailable(detail, component=COMPONENT, condition=NO_ANSWER)
    # The server's words, without the command before them and the script's digest behind.
    words = str(error).rpartition(ANNOTATION)[2].partition(" script: ")[0].strip("(),'\"")
    return Unavailable(f"{CONDITIONS[code]} ({words})", component=COMPONENT, condition=code)


def is_refusal(error: Unavailable) -> bool:
    """Return whether the server answered, and said why it does nothing: an absent one may be back in a moment."""
    return error.context.get("component") == COMPONENT and error.context.get("condition") != NO_ANSWER


def answer_in_time() -> asyncio.Timeout:
    """Limit the time of one command; a ``TimeoutError``, which is an ``OSError``, ends it and its connection."""
    return asyncio.timeout(ANSWER_SECONDS)


async def retried(operation: Callable[[], Awaitable[Answer]], *, deadline_seconds: float) -> Answer:
    """Repeat an operation that is safe to repeat, with growing pauses, while the server is absent.

    Raises:
        Unavailable: the server was absent until the deadline; its last error is the cause.
    """

    async def attempt() -> Answer:
        async with answer_in_time():
            return await operation()

    try:
        return await retry(
            attempt,
            waiting_for="Redis server",
            deadline_seconds=deadline_seconds,
            is_retryable=is_absence,
            level=logging.DEBUG,
        )
    except (RedisError, OSError) as error:
        if not is_absence(error):
            raise
        raise unavailable(error, deadline_seconds) from error


async def check_server(url: str, *, may_be_volatile: bool = False) -> str:
    """Refuse a server that could lose entries or lacks commands that we use.

    Args:
        url: where it is.
        may_be_volatile: accept one that keeps no append-only file.

    Returns:
        Its name and version, such as ``valkey 9.1.2``.

    Raises:
        Unavailable: it does not answer, is older than 6.2, evicts keys when its memory is full, or keeps no append-only
            file.
    """
    client = connect(url)
    try:
        async with answer_in_time():
            facts: dict[str, Any] = await client.info("everything")
    except (RedisError, OSError) as error:
        raise Unavailable(f"no Redis server answers at {address_of(url)}: {error}") from error
    finally:
        await client.aclose()
    version = str(facts["redis_version"])
    needed = ".".join(map(str, MINIMUM_VERSION))
    if tuple(int(part) for part in version.split(".")[:2]) < MINIMUM_VERSION:
        raise Unavailable(f"the server at {address_of(url)} is Redis {version}; {needed} or newer is needed")
    policy = facts.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise Unavailable(
            f"the server at {address_of(url)} evicts keys when its memory is full (maxmemory-policy {policy}), "
            "which would lose work: set maxmemory-policy to noeviction"
        )
    if not facts.get("aof_enabled") and not may_be_volatile:
        raise Unavailable(
            f"the server at {address_of(url)} keeps no append-only file, so all work is lost when it ends: set "
            f"appendonly yes, or {VOLATILE_REDIS}=1 to accept that"
        )
    if "valkey_version" in facts:
        return f"valkey {facts['valkey_version']}"
    return f"redis {version}"


def address_of(url: str) -> str:
    """Name a server without its password, for messages."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return f"{parts.scheme}://{host}{f':{parts.port}' if parts.port else ''}{parts.path}"
