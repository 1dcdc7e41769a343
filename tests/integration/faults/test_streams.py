"""The data plane on a real server while its operations are refused, doubled, lost, slowed and reordered."""

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Iterator

import pytest
from redis.asyncio import Redis

from flotilla.shared.errors import Unavailable
from flotilla.shared.faults.armed import arm, disarm
from flotilla.shared.faults.plan import parse_plan
from flotilla.shared.streams.hop import Claim, Hop, HopName, Resolution, StreamsConfig
from flotilla.shared.streams.plane import DataPlane
from flotilla.shared.streams.redis.connection import connect
from flotilla.shared.streams.redis.plane import RedisDataPlane
from flotilla.shared.testing.builders import a_group, a_task, graded

GROUPS = 40
PER_STEP = 4
PLAN = ";".join(
    [f"streams.{name} duplicate probability=0.3 seed=1" for name in ("forward", "resolve", "issue", "plan", "commit")]
    + [f"streams.{name} refuse probability=0.2 seed=2 phase=after" for name in ("forward", "issue", "plan", "commit")]
    + [f"streams.{name} refuse probability=0.1 seed=3" for name in ("forward", "renew", "plan", "commit")]
    + ["streams.delivery reorder probability=0.3 seed=4 seconds=0.3", "streams.claim refuse probability=0.1 seed=5"]
    + ["streams.forward slow probability=0.1 seed=6 seconds=0.25"]
)


@pytest.fixture(autouse=True)
def faults() -> Iterator[None]:
    arm(parse_plan(PLAN), "rollout")
    yield
    disarm()


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(redis_url)
    yield client
    await client.aclose()


async def claim(hop: Hop) -> list[Claim]:
    try:
        return await hop.claim(5, wait_seconds=0.05)
    except Unavailable:
        return []


async def forward_all(hop: Hop, stop: asyncio.Event, rewards: list[float] | None) -> None:
    """Forward what comes; a tenth is handed back, and a tenth resolved, chosen by the group."""
    chance = random.Random(7)
    while not stop.is_set():
        for each in await claim(hop):
            group = a_group(each.task()) if rewards is None else graded(each.group(), rewards)
            if chance.random() < 0.1:
                await hop.hand_back(each)
            elif rewards is not None and group.task.group_id % 10 == 9:
                await hop.resolve(each, Resolution.FILTERED, "chosen")
            else:
                await hop.forward(each, group)


async def train_all(plane: DataPlane, count: int) -> list[int]:
    """Plan and commit steps until so many groups are trained; gives their ids in order."""
    queue = plane.trainer("trainer")
    await queue.take_over()
    ready: dict[int, Claim] = {}
    trained: list[int] = []
    step = 1
    while len(trained) < count:
        ready |= {each.header.group_id: each for each in await claim(queue.hop)}
        if len(ready) >= PER_STEP:
            chosen = sorted(ready)[:PER_STEP]
            assert await queue.plan(step, [ready.pop(number) for number in chosen], step - 1)
            await queue.commit([step])
            trained += chosen
            step += 1
    return trained


async def test_every_group_ends_once_whatever_is_doubled_lost_or_late(redis: Redis) -> None:
    settings = StreamsConfig(lease_seconds=0.2, max_deliveries=1000)
    plane = RedisDataPlane(redis, uuid.uuid4().hex, config=settings)
    tasks = [a_task(group_id) for group_id in range(GROUPS)]
    issued = 0
    while issued < GROUPS:
        issued += (await plane.admission.issue_many(tasks[issued : issued + 8], limit=GROUPS)).count
        issued = await plane.admission.next_group_id()
    stop = asyncio.Event()
    async with asyncio.timeout(240), asyncio.TaskGroup() as workers:
        for number in range(2):
            workers.create_task(forward_all(plane.hop(HopName.TASKS, f"rollout-{number}"), stop, None))
            workers.create_task(forward_all(plane.hop(HopName.GENERATED, f"reward-{number}"), stop, [0.0, 1.0]))
        trained = await train_all(plane, GROUPS * 9 // 10)
        while (ledger := await plane.ledger()).outstanding:
            assert ledger.balanced, ledger
            await asyncio.sleep(0.02)
        stop.set()

    assert ledger.balanced, ledger
    assert sorted(trained) == [number for number in range(GROUPS) if number % 10 != 9]
    assert (ledger.trained, ledger.filtered) == (GROUPS * 9 // 10, {"chosen": GROUPS // 10})
