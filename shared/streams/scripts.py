"""The server's scripts: loaded from the package, run by digest, sent in full only when the server lacks them."""

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError

from shared.streams.connection import Answer, retried

Argument = str | int | float | bytes

PIPELINE_BYTES = 4 * 1024 * 1024
PIPELINE_CALLS = 256


@dataclass(frozen=True, slots=True)
class Script:
    """A script and the digest under which a server keeps it."""

    source: str
    digest: str


@dataclass(frozen=True, slots=True)
class Call:
    """One run of a script."""

    keys: Sequence[str]
    arguments: Sequence[Argument]

    @property
    def size_bytes(self) -> int:
        """Roughly how much it sends."""
        return sum(len(each) for each in self.arguments if isinstance(each, bytes | str))


@lru_cache(maxsize=32)
def script(name: str) -> Script:
    """Load the script ``name``, with what all scripts share before it."""
    package = files("shared.streams")
    source = "\n".join((package / f"{part}.lua").read_text(encoding="utf-8") for part in ("claims", name))
    return Script(source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


class ScriptRunner:
    """Runs scripts, repeating them while the server is absent: so every script must be safe to repeat."""

    def __init__(self, redis: Redis, *, deadline_seconds: float) -> None:
        self.redis = redis
        self.deadline_seconds = deadline_seconds
        self.failures = 0
        """Attempts whose answer did not arrive, so that a delivery may have been lost with it."""

    async def run(self, name: str, keys: Sequence[str], arguments: Sequence[Argument] = ()) -> Any:
        """Run one script and return its answer.

        Raises:
            Unavailable: the server was absent until the deadline.
        """
        chosen = script(name)

        async def once() -> Any:
            try:
                return await self.redis.evalsha(chosen.digest, len(keys), *keys, *arguments)
            except NoScriptError:
                return await self.redis.eval(chosen.source, len(keys), *keys, *arguments)

        return await self._retried(once)

    async def command(self, *command: Any) -> Any:
        """Run a command that is safe to repeat.

        Raises:
            Unavailable: the server was absent until the deadline.
        """
        return await self._retried(lambda: self.redis.execute_command(*command))

    async def run_many(self, name: str, calls: Sequence[Call]) -> list[Any]:
        """Run a script several times, pipelined; each run is atomic, the whole is not.

        Raises:
            Unavailable: the server was absent until the deadline; some runs may have taken effect.
        """
        answers: list[Any] = []
        for chunk in _chunks(calls):
            answers.extend(await self._run_chunk(name, chunk))
        return answers

    async def _run_chunk(self, name: str, calls: Sequence[Call]) -> list[Any]:
        chosen = script(name)

        async def once() -> list[Any]:
            async with self.redis.pipeline(transaction=False) as pipeline:
                for call in calls:
                    pipeline.evalsha(chosen.digest, len(call.keys), *call.keys, *call.arguments)
                answers: list[Any] = await pipeline.execute(raise_on_error=False)
            return answers

        async def loaded() -> list[Any]:
            answers = await once()
            if any(isinstance(answer, NoScriptError) for answer in answers):
                await self.redis.script_load(chosen.source)
                answers = await once()
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
            return answers

        return await self._retried(loaded)

    async def _retried(self, operation: Callable[[], Awaitable[Answer]]) -> Answer:
        async def counted() -> Answer:
            try:
                return await operation()
            except (RedisError, OSError):
                self.failures += 1
                raise

        return await retried(counted, deadline_seconds=self.deadline_seconds)


def _chunks(calls: Sequence[Call]) -> list[list[Call]]:
    """Cut calls so that no pipeline holds too many bytes at once."""
    chunks: list[list[Call]] = []
    size = 0
    for call in calls:
        if not chunks or size + call.size_bytes > PIPELINE_BYTES or len(chunks[-1]) >= PIPELINE_CALLS:
            chunks.append([])
            size = 0
        chunks[-1].append(call)
        size += call.size_bytes
    return chunks
