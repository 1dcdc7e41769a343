"""The Redis server comes back at an earlier state while a trainer lives that has done more than the server knows.

What was trained since is in nobody's memory but the trainer's, until its next checkpoint. It must not be trained again,
must not fill the budget for good, and must end in the lineage.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from flotilla.cli.redis_server import LocalRedis
from flotilla.shared.streams.hop import StreamsConfig
from flotilla.shared.streams.redis.connection import connect
from flotilla.shared.streams.redis.plane import RedisDataPlane
from tests.integration.trainer.fleet import ScriptedFleet, YesGateway, a_session, a_spec, save_tiny_model

STEPS = 8
R = 2


class Feeding(ScriptedFleet):
    """Records the current version again and again, as the feeder does."""

    async def _fill(self) -> None:
        await self.plane.admission.published(self.gateway.version)
        await super()._fill()


@asynccontextmanager
async def a_server(directory: Path) -> AsyncIterator[tuple[LocalRedis, RedisDataPlane]]:
    server = LocalRedis(directory)
    client = connect(server.start())
    try:
        yield server, RedisDataPlane(client, "e", config=StreamsConfig(lease_seconds=0.5))
    finally:
        await client.aclose()
        server.kill()


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.005)


def go_back(server: LocalRedis, directory: Path, earlier: Path) -> None:
    server.kill()
    shutil.rmtree(directory / "appendonlydir")
    shutil.copytree(earlier, directory / "appendonlydir")
    server.start()


@pytest.mark.parametrize("saved_at", [0, 2], ids=["before the trainer came", "two steps earlier"])
async def test_what_the_server_forgets_is_trained_once_and_ends_in_the_lineage(tmp_path: Path, saved_at: int) -> None:
    spec = a_spec(
        save_tiny_model(tmp_path / "model"),
        optimisation={"steps": STEPS, "groups_per_mini_batch": R},
        checkpoint={"every_steps": STEPS},
    )
    earlier, directory = tmp_path / "earlier", tmp_path / "redis"

    async with a_server(directory) as (server, plane):
        gateway = YesGateway(plane)

        async def save() -> None:
            await asyncio.sleep(1.2)  # a second at most goes unwritten
            shutil.copytree(directory / "appendonlydir", earlier)

        if saved_at == 0:
            await save()
        fleet = Feeding(spec, plane, gateway)
        async with a_session(spec, tmp_path / "run", plane, gateway) as (session, control), asyncio.timeout(240):
            working = asyncio.create_task(fleet.run())
            training = asyncio.create_task(session.run())
            if saved_at:
                await until(lambda: saved_at in gateway.metrics)
                control.pause()
                await save()
                control.resume()
            await until(lambda: saved_at + 2 in gateway.metrics)
            go_back(server, directory, earlier)
            await asyncio.wait({working, training}, return_when=asyncio.FIRST_COMPLETED)
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            assert await training
        ledger = await plane.ledger()
        lineage = await _all(plane.trainer("reader").lineage, range(1, STEPS + 1))

    assert ledger.balanced
    assert ledger.planned == 0
    assert gateway.checkpoints[-1] == STEPS
    trained = [group_id for plan in lineage for group_id in plan.group_ids]
    assert sorted(trained) == list(range(STEPS * R))


async def _all(read: Callable[[int], Awaitable[Any]], numbers: range) -> list[Any]:
    return [await read(number) for number in numbers]
