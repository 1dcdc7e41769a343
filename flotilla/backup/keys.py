"""What an experiment keeps in Redis: read in one instant, by one script, and written to another server."""

import asyncio
import base64
import binascii
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from flotilla.shared.errors import Conflict, InvalidRequest, Unavailable
from flotilla.shared.files.beneath import read_beneath
from flotilla.shared.streams.hop import StreamKeys
from flotilla.shared.streams.plans import Plan
from flotilla.shared.streams.redis.connection import connect

READ: Final = """
local found, seen, cursor = {}, {}, '0'
repeat
    local page = redis.call('SCAN', cursor, 'MATCH', ARGV[1], 'COUNT', 1000)
    cursor = page[1]
    for _, key in ipairs(page[2]) do
        if not seen[key] then
            seen[key] = true
            found[#found + 1] = {key, redis.call('PTTL', key), redis.call('DUMP', key)}
        end
    end
until cursor == '0'
return {found, redis.call('HVALS', KEYS[1]), redis.call('HKEYS', KEYS[2])}
"""
"""All keys of an experiment, its plans, and the numbers of the committed steps that it remembers."""
BATCH: Final = 100
ANSWER_SECONDS: Final = 60.0
"""Longest time for one answer of a server: of all that an experiment has, or to some keys."""
Answer = TypeVar("Answer")


class PlaneSummary(BaseModel, frozen=True):
    """What a data plane knew of training: the first line of its file.

    Attributes:
        committed: newest step that it had resolved as trained; 0: none.
        plans: steps whose groups it still had, in order.
    """

    committed: int
    plans: tuple[int, ...]


class StoredKey(BaseModel, frozen=True):
    """One key: a line each.

    Attributes:
        key: its name.
        ttl: milliseconds that it still has; 0: it does not expire.
        dump: what the server made of its value, in base64.
    """

    key: str
    ttl: int
    dump: str


async def dump_keys(url: str, experiment_ids: list[str], folder: Path) -> None:
    """Write what each experiment has to ``ID.jsonl``; nothing else is served while one is read.

    Raises:
        Unavailable: the server does not answer, or refuses.
    """
    redis = connect(url)
    try:
        for each in experiment_ids:
            keys = StreamKeys(each)
            pattern = f"{{exp:{each}}}*"
            found, plans, steps = await _in_time(redis.eval(READ, 2, keys.plans, keys.lineage, pattern))
            _write(folder / f"{each}.jsonl", found, plans, steps)
    except (RedisError, OSError) as error:
        raise Unavailable(f"the data plane cannot be read: {error}") from error
    finally:
        await redis.aclose()


async def _in_time(answer: Awaitable[Answer]) -> Answer:
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return await answer
    except TimeoutError:
        raise Unavailable(f"the Redis server did not answer within {ANSWER_SECONDS:g} s") from None


def _write(path: Path, found: list[Any], plans: list[bytes], steps: list[bytes]) -> None:
    planned = sorted(Plan.from_bytes(each).step for each in plans)
    summary = PlaneSummary(committed=max(map(int, steps), default=0), plans=tuple(planned))
    with path.open("w", encoding="utf-8") as file:
        file.write(summary.model_dump_json() + "\n")
        for key, milliseconds, content in found:
            encoded = base64.b64encode(content).decode()
            file.write(StoredKey(key=key.decode(), ttl=max(0, milliseconds), dump=encoded).model_dump_json() + "\n")


def _damaged(path: Path, error: Exception) -> InvalidRequest:
    return InvalidRequest(f"this backup is damaged: {path.name} cannot be read: {error}")


def _keys(path: Path) -> Iterator[StoredKey]:
    prefix = f"{StreamKeys(path.stem).prefix}:"
    try:
        with read_beneath(path.parent, path.name) as file:
            next(file, b"")
            for line in file:
                stored = StoredKey.model_validate_json(line)
                if not stored.key.startswith(prefix):
                    raise ValueError(f"{stored.key!r} is no key of this experiment")
                yield stored
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from None


def summary_of(path: Path) -> PlaneSummary | None:
    """Read what a data plane knew; None if the backup has nothing of it.

    Raises:
        InvalidRequest: the file is damaged.
    """
    if not path.exists():
        return None
    try:
        with read_beneath(path.parent, path.name) as file:
            return PlaneSummary.model_validate_json(file.readline())
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from None


async def restore_keys(url: str, experiment_ids: list[str], folder: Path) -> None:
    """Write what each experiment had, and none of it if the whole of it cannot be written.

    Raises:
        Conflict: the server has keys of one of them.
        InvalidRequest: a file is damaged, or has keys that are not its experiment's.
        Unavailable: it does not answer, or is older than the one that was read.
    """
    redis = connect(url)
    try:
        for each in experiment_ids:
            async for keys in _pages(redis, each):
                for key in keys:
                    name = key.decode(errors="replace")
                    raise Conflict(f"the Redis server has keys of {each} already ({name}): restore to an empty one")
        try:
            for each in experiment_ids:
                if (path := folder / f"{each}.jsonl").exists():
                    await _restore(redis, path)
        except BaseException:
            await _remove(redis, experiment_ids)
            raise
    except ResponseError as error:
        raise Unavailable(f"the Redis server refuses a key, as one that is older does: {error}") from error
    except (RedisError, OSError) as error:
        raise Unavailable(f"the data plane cannot be written: {error}") from error
    finally:
        await redis.aclose()


async def remove_keys(url: str, experiment_ids: list[str]) -> None:
    """Delete what a restore has written of experiments.

    Raises:
        Unavailable: the server does not answer, or refuses.
    """
    redis = connect(url)
    try:
        await _remove(redis, experiment_ids)
    except (RedisError, OSError) as error:
        raise Unavailable(f"the data plane cannot be written: {error}") from error
    finally:
        await redis.aclose()


async def _pages(redis: Redis, experiment_id: str) -> AsyncIterator[list[bytes]]:
    cursor = 0
    while True:
        cursor, keys = await _in_time(redis.scan(cursor, match=f"{{exp:{experiment_id}}}*", count=1000))
        yield keys
        if cursor == 0:
            return


async def _remove(redis: Redis, experiment_ids: list[str]) -> None:
    for each in experiment_ids:
        async for keys in _pages(redis, each):
            if keys:
                await _in_time(redis.unlink(*keys))


async def _restore(redis: Redis, path: Path) -> None:
    pipeline = redis.pipeline(transaction=False)
    for count, each in enumerate(_keys(path), start=1):
        try:
            content = base64.b64decode(each.dump, validate=True)
        except binascii.Error as error:
            raise _damaged(path, error) from None
        pipeline.restore(each.key, each.ttl, content)
        if count % BATCH == 0:
            await _in_time(pipeline.execute())
    await _in_time(pipeline.execute())
