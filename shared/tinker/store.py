"""How the Tinker API's state lies in Redis: names of keys, and commands that are sent again while it is away."""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from redis.asyncio import Redis

from flotilla.shared.errors import Unavailable
from flotilla.shared.streams.redis.connection import retried

log = logging.getLogger(__name__)

PREFIX: Final = "flotilla:tinker:"
DEADLINE_SECONDS: Final = 30.0
AWAY_SECONDS: Final = 1.0
"""Between two tries, where Redis was away for longer than a command waits."""

Result = TypeVar("Result")


class Store:
    """Sends commands.

    Args:
        redis: a client whose answers are bytes.
    """

    def __init__(self, redis: Redis) -> None:
        self._redis: Any = redis

    async def _names(self, *parts: str) -> list[str]:
        return sorted(each.decode() for each in await self._retried("SMEMBERS", key(*parts)))

    async def _run(self, script: str, keys: list[str], arguments: list[Any]) -> Any:
        return await self._retried("EVAL", script, len(keys), *keys, *arguments)

    async def _retried(self, *command: Any) -> Any:
        async def once() -> Any:
            return await self._redis.execute_command(*command)

        return await retried(once, deadline_seconds=DEADLINE_SECONDS)


async def as_long_as_it_takes(operation: Callable[[], Awaitable[Result]]) -> Result:
    """Retry while Redis is unavailable: for answers to what was done already."""
    while True:
        try:
            return await operation()
        except Unavailable as error:
            log.warning("Redis is waited for", extra={"error": error.detail})
            await asyncio.sleep(AWAY_SECONDS)


def key(*parts: str) -> str:
    """Name a key."""
    return PREFIX + ":".join(parts)


def request_id_of(model_id: str, seq: int) -> str:
    """Name a model's request."""
    return f"{model_id}:{seq}"


def session_of(name: str) -> str:
    """Return the session that the id of a model or of a sampling session begins with."""
    return name.partition(":")[0]


def short_name(actor: str) -> str:
    """Return the name under which what belongs to a token is kept."""
    return hashlib.sha256(actor.encode()).hexdigest()[:16]


def answer_key(request_id: str, *part: str) -> str:
    """Name the key of an answer, or of a part of it."""
    return key("answer", request_id, *part)
