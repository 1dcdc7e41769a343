"""A server that ends is started again, one that ends while it starts as well, but not for ever."""

import asyncio
from collections.abc import Sequence

import pytest

from flotilla.cli import processes, redis_server
from flotilla.cli.processes import MAX_RESTARTS
from flotilla.cli.redis_server import RedisKeeper
from flotilla.shared.errors import Unavailable


class Server:
    """Fails to start as often as it is told to; ended from the beginning."""

    def __init__(self, *, fails: int) -> None:
        self.pid: int | None = None
        self.starts = 0
        self._fails = fails

    def start(self) -> str:
        self.starts += 1
        if self.starts <= self._fails:
            raise Unavailable("it ended with code -9")
        self.pid = self.starts
        return "unix://"


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_server, "WATCH_SECONDS", 0)
    monkeypatch.setattr(processes, "LONGEST_PAUSE_SECONDS", 0)


async def kept(server: Server, said: list[str]) -> RedisKeeper:
    """Keep a server until it runs or is given up."""
    keeper = RedisKeeper(server, said.append)
    keeping = asyncio.create_task(keeper.run())
    async with asyncio.timeout(30):
        while server.pid is None and not keeping.done():
            await asyncio.sleep(0)
    keeping.cancel()
    await asyncio.wait([keeping])
    return keeper


@pytest.mark.parametrize("fails", [0, 1, MAX_RESTARTS - 1])
async def test_a_server_that_ends_while_it_starts_is_started_again(fails: int) -> None:
    server, said = Server(fails=fails), list[str]()

    keeper = await kept(server, said)

    assert (server.pid, keeper.gave_up) == (fails + 1, None)
    assert sum("did not start: it ended with code -9" in line for line in said) == fails


async def test_a_server_that_never_starts_is_given_up() -> None:
    server, said = Server(fails=99), list[str]()

    keeper = await kept(server, said)

    assert server.starts == MAX_RESTARTS
    assert keeper.gave_up == "redis cannot be started again: it ended with code -9"


async def test_a_server_may_end_again_and_again_if_it_starts() -> None:
    server = Server(fails=0)
    keeper = RedisKeeper(server, lambda _: None)
    keeping = asyncio.create_task(keeper.run())
    ends: Sequence[int] = range(3 * MAX_RESTARTS)
    async with asyncio.timeout(30):
        for number in ends:
            while server.pid is None:
                await asyncio.sleep(0)
            assert server.starts == number + 1
            server.pid = None
    keeping.cancel()
    await asyncio.wait([keeping])

    assert keeper.gave_up is None
