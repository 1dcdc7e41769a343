"""Rollout, reward and trainer over a server that refuses: they wait, do nothing twice, and go on."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from flotilla.cli.redis_server import LocalRedis
from flotilla.services.reward.consumer import RewardConsumer, RewardLane
from flotilla.services.rollout.consumer import LaneConfig, RolloutConsumer
from flotilla.services.rollout.weights.version import VersionGate
from flotilla.services.trainer.data.group_metrics import Totals
from flotilla.services.trainer.data.source import GroupSource, Requirements
from flotilla.shared.checkpoints.lineage import INITIAL, VersionLine
from flotilla.shared.config.sections.reward import RewardConfig
from flotilla.shared.schemas.grading import Grade, GradingSample
from flotilla.shared.schemas.task import Task
from flotilla.shared.schemas.trajectory import Group
from flotilla.shared.streams.hop import HopName, StreamsConfig
from flotilla.shared.streams.intervals import IntervalSet
from flotilla.shared.streams.redis.connection import connect
from flotilla.shared.streams.redis.plane import RedisDataPlane
from flotilla.shared.testing.builders import a_group
from tests.contract.streams.conftest import issue, ledger_of
from tests.integration.streams.refusals import REFUSALS, small_disk

GROUPS = 24
REFUSED_SECONDS = 1.5
"""Five times as long as a call waits before it is unavailable."""


class Counting:
    """Samples and grades slowly, and counts how often."""

    def __init__(self) -> None:
        self.sampled: list[int] = []
        self.graded = 0

    async def run(self, task: Task, partials: object, serving: int, *, delivery: str) -> Group:
        self.sampled.append(task.group_id)
        await asyncio.sleep(0.1)
        return a_group(task)

    async def score(self, samples: Sequence[GradingSample]) -> list[Grade]:
        self.graded += len(samples)
        await asyncio.sleep(0.05)
        return [Grade.scored(float(sample.id.endswith("/1"))) for sample in samples]

    async def aclose(self) -> None:
        return None


@asynccontextmanager
async def a_pipeline(plane: RedisDataPlane, work: Counting) -> AsyncIterator[GroupSource]:
    gate = VersionGate()
    await gate.set(0)
    lane = LaneConfig("train", max_groups=3, task_seconds=30.0)
    rollout = RolloutConsumer([(lane, plane.hop(HopName.TASKS, "rollout"))], work, gate, lambda _: None)  # type: ignore[arg-type]
    graded = RewardLane("train", plane.hop(HopName.GENERATED, "reward"), is_filtered=True)
    reward = RewardConsumer([graded], work, RewardConfig(), concurrency=3)
    queue = plane.trainer("trainer")
    await queue.take_over()
    needs = Requirements(vocabulary=10**6, min_scored=2, components=(), max_lag=1)
    line = VersionLine.of([INITIAL], steps_per_version=1, total_steps=100)
    source = GroupSource(queue, needs, IntervalSet(), Totals(), line)
    rollout.resume()
    reward.resume()
    tasks = [asyncio.create_task(each.run()) for each in (rollout, reward, source)]
    try:
        yield source
        assert not [task for task in tasks if task.done()], "nobody ended"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("code", ["MISCONF", "NOREPLICAS", "READONLY", "BUSY", "OOM"])
async def test_consumers_wait_for_a_server_that_refuses(tmp_path: Path, code: str) -> None:
    refusal, _ = REFUSALS[code]
    work = Counting()
    with small_disk(tmp_path / "disk") as disk, LocalRedis(disk / "redis") as server:
        async with connect(server.url) as redis:
            plane = RedisDataPlane(redis, uuid.uuid4().hex, config=StreamsConfig(deadline_seconds=0.3))
            await issue(plane, GROUPS)
            async with asyncio.timeout(60), a_pipeline(plane, work) as source:
                while source.num_ready < GROUPS // 4:
                    await asyncio.sleep(0.01)

                async with refusal(server.url, disk / "redis"):
                    await asyncio.sleep(REFUSED_SECONDS)
                    assert source.num_ready < GROUPS

                while source.num_ready < GROUPS:
                    await asyncio.sleep(0.01)
            ledger = await ledger_of(plane)
    assert sorted(work.sampled) == list(range(GROUPS)), "each once"
    assert work.graded == 2 * GROUPS
    assert (ledger.failed, ledger.dropped, ledger.filtered) == ({}, {}, {})
