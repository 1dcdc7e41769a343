"""Connections to the server, and calls that outlive its short absences."""

import asyncio
import random
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from shared.errors import Unavailable
from shared.streams.redis.connection_io import PACKING

MINIMUM_VERSION = (6, 2)
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 15.0
"""Longest time for one attempt of a command; far above the half second for which one may block."""
FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 1.0

ABSENCE = re.compile(r"^(OOM|LOADING|MASTERDOWN|TRYAGAIN)\b|-OOM command not allowed")

Answer = TypeVar("Answer")


def connect(url: str) -> Redis:
    """Open a client for ``redis://``, ``rediss://`` or ``unix://``; it connects at its first command.

    Answers are bytes. The client itself repeats nothing: a repeated command could take effect twice, so that
    is left to callers that know theirs is safe. Nor does it limit the time of a command: with a limit, redis-py sends
    through ``asyncio.wait_for``, which before Python 3.12 loses a cancellation that comes at the same moment. Use
    ``answer_in_time`` around its commands. Close it with ``await client.aclose()``.
    """
    client = Redis.from_url(
        url,
        protocol=2,
        decode_responses=False,
        socket_timeout=None,
        socket_connect_timeout=CONNECT_SECONDS,
        socket_read_size=256 * 1024,
        retry=Retry(NoBackoff(), 0),
    )
    client.connection_pool.connection_class = PACKING[client.connection_pool.connection_class]
    return client


def is_absence(error: Exception) -> bool:
    """Tell whether the server may answer the same command later: it is away, loading, read-only or full."""
    if isinstance(error, AuthenticationError):
        return False
    if isinstance(error, RedisConnectionError | RedisTimeoutError | OSError | ReadOnlyError | OutOfMemoryError):
        return True
    # Version 6.2 wraps the error that a script met into a text of its own.
    return isinstance(error, ResponseError) and ABSENCE.search(str(error)) is not None


def answer_in_time() -> asyncio.Timeout:
    """Limit the time of one command; a ``TimeoutError``, which is an ``OSError``, ends it and its connection."""
    return asyncio.timeout(ANSWER_SECONDS)


async def retried(operation: Callable[[], Awaitable[Answer]], *, deadline_seconds: float) -> Answer:
    """Repeat an operation that is safe to repeat, with growing pauses, while the server is absent.

    Raises:
        Unavailable: the server was absent until the deadline; its last error is the cause.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + deadline_seconds
    pause = FIRST_PAUSE_SECONDS
    while True:
        try:
            async with answer_in_time():
                return await operation()
        except (RedisError, OSError) as error:
            if not is_absence(error):
                raise
            if clock() + pause >= deadline:
                raise Unavailable(f"the Redis server did not answer within {deadline_seconds:g} s: {error}") from error
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


async def check_server(url: str) -> str:
    """Refuse a server that could lose entries or lacks commands that we use.

    Returns:
        Its name and version, such as ``valkey 9.1.2``.

    Raises:
        Unavailable: it does not answer, is older than 6.2, or evicts keys when its memory is full.
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
    if "valkey_version" in facts:
        return f"valkey {facts['valkey_version']}"
    return f"redis {version}"


def address_of(url: str) -> str:
    """Name a server without its password, for messages."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return f"{parts.scheme}://{host}{f':{parts.port}' if parts.port else ''}{parts.path}"
