"""A trainer goes on while its server comes back without the end of its log: each group is trained once."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from flotilla.cli.redis_server import LocalRedis
from flotilla.services.trainer.data.group_metrics import Totals
from flotilla.services.trainer.data.source import GroupSource
from flotilla.shared.streams.hop import HopName, StreamsConfig
from flotilla.shared.streams.intervals import IntervalSet
from flotilla.shared.streams.plans import TrainerQueue
from flotilla.shared.streams.redis.connection import connect
from flotilla.shared.streams.redis.plane import RedisDataPlane
from tests.integration.streams.test_server_crash import keep_one_log, log_of, lose_the_end_of_the_log
from tests.unit.trainer.builders import a_group
from tests.unit.trainer.test_source import LINE, STRICT, a_running, issue

PATIENCE_SECONDS = 60.0


@contextlib.asynccontextmanager
async def a_server(directory: Path) -> AsyncIterator[tuple[LocalRedis, RedisDataPlane]]:
    server = LocalRedis(directory)
    client = connect(server.start())
    try:
        await keep_one_log(server.url)
        yield server, RedisDataPlane(client, "tail", config=StreamsConfig(lease_seconds=0.5))
    finally:
        await client.aclose()
        server.kill()


async def written(directory: Path) -> int:
    """Wait until all that the server has done is in its log; gives its size."""
    size, before = log_of(directory).stat().st_size, -1
    while size != before:
        await asyncio.sleep(0.3)
        size, before = log_of(directory).stat().st_size, size
    return size


async def score(plane: RedisDataPlane, count: int) -> None:
    """Take so many tasks through rollout and reward."""
    left = {HopName.TASKS: count, HopName.GENERATED: count}
    for name in left:
        hop = plane.hop(name, name.value)
        while left[name]:
            claims = await hop.claim(count, wait_seconds=0.2)
            for claim in claims:
                task = claim.task() if name is HopName.TASKS else claim.group().task
                assert await hop.forward(claim, a_group([1.0, 0.0], task))
            left[name] -= len(claims)


async def ready(source: GroupSource, *group_ids: int) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while {each.group_id for each in source.oldest(9)} != set(group_ids):
            await asyncio.sleep(0.02)


async def trained_in(queue: TrainerQueue, step: int) -> tuple[int, ...]:
    plan = await queue.lineage(step)
    assert plan is not None
    return plan.group_ids


async def test_what_is_held_or_trained_when_the_log_loses_its_end_is_trained_once(tmp_path: Path) -> None:
    directory = tmp_path / "redis"
    async with a_server(directory) as (server, plane):
        queue = plane.trainer("trainer")
        await queue.take_over()
        await issue(plane, 0, 0, 0)
        size = await written(directory)
        await score(plane, 3)
        trained = IntervalSet()
        async with a_running(GroupSource(queue, STRICT, trained, Totals(), LINE)) as source:
            await ready(source, 0, 1, 2)
            assert await source.plan(1, source.oldest(1), 0, "")
            trained.add(0)
            await source.commit(1, trained)
            held = {each.group_id: each.claim.entry_id for each in source.oldest(2)}
            assert (await plane.ledger()).trained == 1

            # Of what follows the tasks nothing is left: neither the step, nor what the trainer has claimed.
            lost = await written(directory) - size
            server.kill()
            lose_the_end_of_the_log(directory, lost)
            await asyncio.to_thread(server.start)
            assert (await plane.ledger()).waiting.tasks == 3
            await score(plane, 3)

            async with asyncio.timeout(PATIENCE_SECONDS):
                while {each.group_id: each.claim.entry_id for each in source.oldest(9)}.items() & held.items():
                    await asyncio.sleep(0.02)
                while (await plane.ledger()).trained < 1:
                    await asyncio.sleep(0.02)
            await ready(source, 1, 2)
            assert await source.plan(2, source.oldest(2), 1, "")
            trained.add_many([1, 2])
            await source.commit(2, trained)

        ledger = await plane.ledger()
        assert ledger.balanced
        assert (ledger.issued, ledger.trained, ledger.planned, ledger.outstanding) == (3, 3, 0, 0)
        assert await trained_in(queue, 2) == (1, 2)


async def test_a_plan_that_stands_again_since_its_commit_is_lost_is_committed_with_the_next(tmp_path: Path) -> None:
    directory = tmp_path / "redis"
    async with a_server(directory) as (server, plane):
        queue = plane.trainer("trainer")
        await queue.take_over()
        await issue(plane, 0, 0)
        await score(plane, 2)
        trained = IntervalSet()
        async with a_running(GroupSource(queue, STRICT, trained, Totals(), LINE)) as source:
            await ready(source, 0, 1)
            assert await source.plan(1, source.oldest(1), 0, "")
            size = await written(directory)
            trained.add(0)
            await source.commit(1, trained)
            lost = await written(directory) - size
            server.kill()
            lose_the_end_of_the_log(directory, lost)
            await asyncio.to_thread(server.start)
            assert (await plane.ledger()).planned == 1

            assert await source.plan(2, source.oldest(1), 1, "")
            trained.add(1)
            await source.commit(2, trained)

        ledger = await plane.ledger()
        assert (ledger.balanced, ledger.trained, ledger.planned, ledger.outstanding) == (True, 2, 0, 0)
        assert [await trained_in(queue, step) for step in (1, 2)] == [(0,), (1,)]
