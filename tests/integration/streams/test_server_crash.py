"""The server is killed under load and comes back from its log: an earlier state perhaps, but a consistent one."""

import asyncio
import os
import time
from collections import Counter
from pathlib import Path

import pytest

from flotilla.cli.redis_server import LocalRedis
from flotilla.shared.streams.hop import Claim, Hop, HopName, StreamsConfig
from flotilla.shared.streams.intervals import IntervalSet
from flotilla.shared.streams.redis.connection import connect
from flotilla.shared.streams.redis.plane import RedisDataPlane
from flotilla.shared.testing.builders import a_group, a_task, graded
from tests.contract.streams.conftest import ledger_of

CRASHES = 3
GROUPS_PER_STEP = 4


class Load:
    """Everybody at once: a feeder, two rollouts, two rewards and a trainer that commits every third step."""

    def __init__(self, plane: RedisDataPlane) -> None:
        self.plane = plane
        self.trained: Counter[int] = Counter()
        self.committed = IntervalSet()
        self.has_crashed = asyncio.Event()
        self.is_done = asyncio.Event()
        self.target: int | None = None

    async def feed(self) -> None:
        admission = self.plane.admission
        # The cursor may have come back too: go on until everything that was trained is issued again.
        while (first := await admission.next_group_id()) <= max(
            self.trained, default=0
        ) or not self.has_crashed.is_set():
            await admission.issue_many([a_task(first + index) for index in range(8)], limit=100)
            await admission.published(1 + (await admission.published_version() or 0))
            await asyncio.sleep(0.001)
        self.target = await admission.next_group_id()

    async def answer(self, hop: Hop) -> None:
        while not self.is_done.is_set():
            claims = await hop.claim(4, wait_seconds=0.2)
            made = [
                a_group(claim.task(), sampled_tokens=tokens_of(claim))
                if hop.name is HopName.TASKS
                else graded(claim.group(), [0.0, 1.0])
                for claim in claims
            ]
            await hop.forward_many(list(zip(claims, made, strict=True)))

    async def train(self) -> None:
        trainer = self.plane.trainer("trainer")
        await trainer.take_over()
        step, open_steps = 0, dict[int, list[int]]()
        while self.target is None or len(self.committed) < self.target:
            claims = []
            for claim in await trainer.hop.claim(GROUPS_PER_STEP, wait_seconds=0.2):
                if claim.header.group_id in self.committed:
                    await trainer.resolve_already_trained(claim)
                elif any(claim.header.group_id in ids for ids in open_steps.values()):
                    # Trained, but not yet in a checkpoint, and its plan went with the lost second.
                    await trainer.hop.hand_back(claim)
                else:
                    claims.append(claim)
            if claims:
                step += 1
                if await trainer.plan(step, claims, version=0):
                    open_steps[step] = [claim.header.group_id for claim in claims]
                    self.trained.update(open_steps[step])
            if len(open_steps) >= 3 or not claims:
                for ids in open_steps.values():
                    self.committed.add_many(ids)  # the checkpoint is durable
                await trainer.commit(list(open_steps))
                open_steps.clear()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for name in (HopName.TASKS, HopName.GENERATED):
                for service in ("one", "other"):
                    tasks.create_task(self.answer(self.plane.hop(name, service)))
            tasks.create_task(self.feed())
            await self.train()
            self.is_done.set()


def tokens_of(claim: Claim) -> int:
    """Make every fifth group so large that a command of its own appends it."""
    return 8000 if claim.header.group_id % 5 == 0 else 2


@pytest.mark.parametrize("lost_bytes", [0, 60_000, 400_000])
async def test_work_goes_on_and_balances_after_the_server_was_killed(tmp_path: Path, lost_bytes: int) -> None:
    server = LocalRedis(tmp_path / "redis")
    client = connect(server.start())
    await keep_one_log(server.url)
    plane = RedisDataPlane(client, "crash", config=StreamsConfig(lease_seconds=0.5, max_deliveries=1000))
    load = Load(plane)
    try:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(load.run())
            for _ in range(CRASHES):
                await asyncio.sleep(0.7)
                async with asyncio.timeout(90):
                    while log_of(tmp_path / "redis").stat().st_size <= lost_bytes:
                        await asyncio.sleep(0.01)
                trained = len(load.committed)
                server.kill()
                await asyncio.sleep(0.1)
                lose_the_end_of_the_log(tmp_path / "redis", lost_bytes)
                server.start()
                await keep_one_log(server.url)
                await ledger_of(plane)
                async with asyncio.timeout(90):
                    while len(load.committed) <= trained:
                        await asyncio.sleep(0.01)
            load.has_crashed.set()
            async with asyncio.timeout(120):
                await running
        await settle(plane, load)
    finally:
        await client.aclose()
        server.kill()


def log_of(directory: Path) -> Path:
    return max(directory.rglob("*.aof"), key=lambda path: path.stat().st_size)


async def keep_one_log(url: str) -> None:
    """Let the server never rewrite its log: of two files, only the later may lose its end."""
    async with connect(url) as client:
        await client.config_set("auto-aof-rewrite-percentage", 0)


def lose_the_end_of_the_log(directory: Path, lost_bytes: int) -> None:
    """Cut what a power failure would have cut; the cut goes through the middle of a transaction, most likely."""
    log = log_of(directory)
    size = log.stat().st_size
    assert size > lost_bytes
    os.truncate(log, size - lost_bytes)


async def settle(plane: RedisDataPlane, load: Load) -> None:
    """Resolve what came again after its checkpoint; then everything is trained, in one place, once."""
    trainer = plane.trainer("last")
    await trainer.take_over()
    hops = [plane.hop(HopName.TASKS, "last"), plane.hop(HopName.GENERATED, "last")]
    deadline = time.monotonic() + 120
    while (ledger := await ledger_of(plane)).outstanding:
        assert time.monotonic() < deadline, ledger
        for hop in hops:
            for claim in await hop.claim(8, wait_seconds=0):
                await hop.forward(claim, graded(a_group(claim.task()), [0.0, 1.0]))
        for claim in await trainer.hop.claim(8, wait_seconds=0.1):
            assert claim.header.group_id in load.committed
            await trainer.resolve_already_trained(claim)
    await trainer.commit([plan.step for plan in await trainer.plans_from(0)])
    ledger = await ledger_of(plane)
    assert (ledger.issued, ledger.trained, ledger.planned) == (load.target, load.target, 0)
    assert set(load.trained.values()) == {1}, "each group was trained once along this lineage"
    assert load.target is not None
    assert load.target > 100
    assert load.committed.to_list() == [[0, load.target - 1]]
