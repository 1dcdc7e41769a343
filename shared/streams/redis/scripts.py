"""The server's scripts: loaded from the package, run by digest, sent in full only when the server lacks them."""

import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any, NamedTuple

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from flotilla.shared.faults.armed import armed
from flotilla.shared.faults.sites import Site
from flotilla.shared.streams.redis.connection import MOVED_AWAY, Answer, condition_of, note_attempt, retried

Argument = str | int | float | bytes

SITES = {
    site.value.removeprefix("streams."): site
    for site in (
        Site.FORWARD,
        Site.RESOLVE,
        Site.ISSUE,
        Site.RENEW,
        Site.HAND_BACK,
        Site.HAND_OVER,
        Site.PLAN,
        Site.COMMIT,
    )
}
"""Where faults can happen, by script; ``finish`` is named by its mode."""


@dataclass(frozen=True, slots=True)
class Script:
    """A script and the digest under which a server keeps it."""

    source: str
    digest: str


@lru_cache(maxsize=32)
def script(name: str) -> Script:
    """Load the script ``name``, with what all scripts share before it."""
    package = files("flotilla.shared.streams.redis") / "lua"
    source = "\n".join((package / f"{part}.lua").read_text(encoding="utf-8") for part in ("prelude", name))
    return Script(source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


class Call(NamedTuple):
    """One run of a script.

    Attributes:
        keys, arguments: the script's.
        before: a command that takes effect together with it, before it, or not at all.
    """

    keys: list[str]
    arguments: Sequence[Argument]
    before: Sequence[Argument] = ()


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
        return (await self.run_in_order(name, [Call(list(keys), arguments)]))[0]

    async def run_in_order(self, name: str, calls: Sequence[Call]) -> list[Any]:
        """Run one script several times in one round trip, in order, and return the answers.

        The server works on one while it receives the next. All are repeated if one of them got no answer.

        Raises:
            Unavailable: the server was absent until the deadline.
        """
        chosen = script(name)

        async def once() -> list[Any]:
            try:
                return await self._in_order(chosen, calls)
            except NoScriptError:
                await self.redis.script_load(chosen.source)
                return await self._in_order(chosen, calls)

        faults = armed()
        site = None if faults is None else SITES.get(str(calls[0].arguments[0]) if name == "finish" else name)
        if faults is None or site is None:
            return await self.retried(once)
        at = site
        return await self.retried(lambda: faults.around(at, once, refusal=RedisConnectionError))

    async def _in_order(self, chosen: Script, calls: Sequence[Call]) -> list[Any]:
        if len(calls) == 1 and not calls[0].before:
            keys, arguments, _ = calls[0]
            return [await self.redis.execute_command("EVALSHA", chosen.digest, len(keys), *keys, *arguments)]
        async with self.redis.pipeline(transaction=False) as pipeline:
            for keys, arguments, before in calls:
                if before:
                    # The script in full: one that the server lacks would fail, and what comes before it would not.
                    pipeline.execute_command("MULTI")
                    pipeline.execute_command(*before)
                    pipeline.execute_command("EVAL", chosen.source, len(keys), *keys, *arguments)
                    pipeline.execute_command("EXEC")
                else:
                    pipeline.execute_command("EVALSHA", chosen.digest, len(keys), *keys, *arguments)
            return _answers(await pipeline.execute(), calls)

    async def command(self, *command: Any) -> Any:
        """Run a command that is safe to repeat.

        Raises:
            Unavailable: the server was absent until the deadline.
        """
        return await self.retried(lambda: self.redis.execute_command(*command))

    async def retried(self, operation: Callable[[], Awaitable[Answer]]) -> Answer:
        """Do what is safe to repeat.

        Raises:
            Unavailable: the server was absent until the deadline.
        """

        async def counted() -> Answer:
            is_answered, has_refused, has_failed, asked_at = False, False, False, time.monotonic()
            try:
                answer = await operation()
                is_answered = True
                return answer
            except RedisError as error:
                has_failed = isinstance(error, RedisConnectionError | RedisTimeoutError)
                has_refused = not has_failed
                if condition_of(error) in MOVED_AWAY:
                    # The next connection asks again where the address leads.
                    await self.redis.connection_pool.disconnect(inuse_connections=False)
                raise
            finally:
                # Not by kind of error: the end of an attempt's time arrives here as a cancellation.
                self.failures += not is_answered
                note_attempt(
                    self.redis, is_answered=is_answered or has_refused, has_failed=has_failed, began_at=asked_at
                )

        return await retried(counted, deadline_seconds=self.deadline_seconds)


def _answers(replies: Sequence[Any], calls: Sequence[Call]) -> list[Any]:
    """Find each script's answer among the replies to what was sent for it.

    Raises:
        RedisError: a script failed in its transaction.
    """
    answers, position = [], 0
    for call in calls:
        position += 4 if call.before else 1
        answer = replies[position - 1][-1] if call.before else replies[position - 1]
        if isinstance(answer, RedisError):
            raise answer
        answers.append(answer)
    return answers
