"""Ways in which a server of our own refuses what it did before: each begins, and ends when its context does."""

import asyncio
import contextlib
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from flotilla.shared.streams.redis.connection import connect

SMALL_DISK_BYTES = 32 * 1024 * 1024
UNTIL_SECONDS = 20.0

Refusal = Callable[[str, Path], AbstractAsyncContextManager[None]]
"""Given the server's url and its directory."""


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    """A small file system; skips the test where none can be mounted."""
    path.mkdir(parents=True)
    options = ["-t", "tmpfs", "-o", f"size={SMALL_DISK_BYTES}", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(["mount", *options], check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@contextlib.asynccontextmanager
async def full_disk(url: str, directory: Path) -> AsyncIterator[None]:
    filler = directory / "filler"
    async with connect(url) as client:
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(65536)):
                pass
        await _until_refused(client, "MISCONF")
        try:
            yield
        finally:
            filler.unlink()
            await _until_written(client)


@contextlib.asynccontextmanager
async def no_replicas(url: str, directory: Path) -> AsyncIterator[None]:
    async with _set(url, "min-replicas-to-write", 1, 0):
        yield


@contextlib.asynccontextmanager
async def read_only(url: str, directory: Path) -> AsyncIterator[None]:
    """The server is a replica of one that nobody reaches, as an old primary after a fail-over."""
    async with connect(url) as client:
        await client.execute_command("REPLICAOF", "127.0.0.1", "1")
        try:
            yield
        finally:
            await client.execute_command("REPLICAOF", "NO", "ONE")


@contextlib.asynccontextmanager
async def without_primary(url: str, directory: Path) -> AsyncIterator[None]:
    async with _set(url, "replica-serve-stale-data", "no", "yes"), read_only(url, directory):
        yield


@contextlib.asynccontextmanager
async def busy(url: str, directory: Path) -> AsyncIterator[None]:
    """Somebody's script never ends."""
    async with _set(url, "lua-time-limit", 10, 5000), connect(url) as owner, connect(url) as client:
        running = asyncio.create_task(owner.execute_command("EVAL", "while true do end", 0))
        await _until_refused(client, "BUSY")
        try:
            yield
        finally:
            await client.execute_command("SCRIPT", "KILL")
            await asyncio.gather(running, return_exceptions=True)


@contextlib.asynccontextmanager
async def full_memory(url: str, directory: Path) -> AsyncIterator[None]:
    async with _set(url, "maxmemory", 1, 0):
        yield


@contextlib.asynccontextmanager
async def no_permission(url: str, directory: Path) -> AsyncIterator[None]:
    async with connect(url) as client:
        await client.execute_command("ACL", "SETUSER", "default", "-xadd", "-evalsha", "-eval", "-xreadgroup")
        try:
            yield
        finally:
            await client.execute_command("ACL", "SETUSER", "default", "+@all")


REFUSALS: dict[str, tuple[Refusal, str]] = {
    "MISCONF": (full_disk, "disk"),
    "NOREPLICAS": (no_replicas, "replicas"),
    "READONLY": (read_only, "read-only replica"),
    "MASTERDOWN": (without_primary, "replica"),
    "BUSY": (busy, "busy with a script"),
    "OOM": (full_memory, "memory"),
    "NOPERM": (no_permission, "permission"),
}
"""Condition -> how it comes about, and what its name has in it."""


@contextlib.asynccontextmanager
async def _set(url: str, name: str, value: object, after: object) -> AsyncIterator[None]:
    async with connect(url) as client:
        await client.config_set(name, value)
        try:
            yield
        finally:
            # A replica without its primary refuses even this for a moment.
            async with asyncio.timeout(UNTIL_SECONDS):
                while True:
                    with contextlib.suppress(RedisError):
                        await client.config_set(name, after)
                        break
                    await asyncio.sleep(0.05)


async def _until_refused(client: Redis, code: str) -> None:
    async with asyncio.timeout(UNTIL_SECONDS):
        while True:
            try:
                await client.execute_command("APPEND", "filler", bytes(1024))
            except RedisError as error:
                assert code in str(error), error
                return
            await asyncio.sleep(0.01)


async def _until_written(client: Redis) -> None:
    async with asyncio.timeout(UNTIL_SECONDS):
        while True:
            with contextlib.suppress(RedisError):
                await client.delete("filler")
                return
            await asyncio.sleep(0.05)
