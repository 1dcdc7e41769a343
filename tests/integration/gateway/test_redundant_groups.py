"""Redundant groups through feeder, rollout and trainer: no step waits for a group that does not come."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from flotilla.services.rollout.consumer import LaneConfig, RolloutConsumer
from flotilla.services.rollout.weights.version import VersionGate
from flotilla.services.trainer.data.group_metrics import Totals
from flotilla.services.trainer.data.plan import StepPlanner
from flotilla.services.trainer.data.source import GroupSource, Requirements
from flotilla.shared.checkpoints.lineage import INITIAL, ROOT, VersionLine
from flotilla.shared.schemas.task import Task
from flotilla.shared.schemas.trajectory import Group
from flotilla.shared.streams.hop import REDUNDANT, HopName
from flotilla.shared.streams.intervals import IntervalSet
from flotilla.shared.streams.partials import Partials
from flotilla.shared.streams.plane import DataPlane
from flotilla.shared.testing.builders import a_group
from tests.unit.gateway.test_feeder import Rig, a_rig
from tests.unit.trainer.builders import no_changes
from tests.unit.trainer.test_source import never

STEPS, GROUPS, REDUNDANT_GROUPS = 4, 3, 4


class SomeNeverAnswer:
    """Every third task is sampled for ever; knows under which versions, and counts how often that was ended."""

    def __init__(self) -> None:
        self.num_ended = 0
        self.sampling: dict[int, int] = {}

    async def run(self, task: Task, partials: Partials, serving: int, *, delivery: str) -> Group:
        if task.group_id % 3 == 0:
            self.sampling[task.group_id] = serving
            try:
                await asyncio.Event().wait()
            finally:
                del self.sampling[task.group_id]
                self.num_ended += 1
        return a_group(task, version=serving, rewards=[1.0, *[0.0] * (task.group_size - 1)])

    async def interrupt(self) -> None: ...


async def grade(plane: DataPlane) -> None:
    hop = plane.hop(HopName.GENERATED, "reward")
    while True:
        for claim in await hop.claim(8, wait_seconds=0.05):
            await hop.forward(claim, claim.group())


@asynccontextmanager
async def a_fleet(rig: Rig, gate: VersionGate, episodes: SomeNeverAnswer) -> AsyncIterator[StepPlanner]:
    spec, plane = rig.experiment.spec, rig.experiment.train
    lanes = [(LaneConfig("train", 16, 60.0, spec.asynchrony.resolved_max_lag), plane.hop(HopName.TASKS, "rollout"))]
    consumer = RolloutConsumer(lanes, episodes, gate, lambda _: None)
    consumer.resume()
    queue = plane.trainer("trainer")
    await queue.take_over()
    needs = Requirements(10**6, 2, (), spec.asynchrony.resolved_max_lag, too_old=REDUNDANT)
    line = VersionLine.of([INITIAL], steps_per_version=1, total_steps=STEPS)
    source = GroupSource(queue, needs, IntervalSet(), Totals(), line)
    running = [asyncio.create_task(each) for each in (rig.feeder.run(), consumer.run(), grade(plane), source.run())]
    try:
        yield StepPlanner(spec, queue, plane.admission, source, line, no_changes(spec))
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def test_no_step_waits_for_a_group_that_does_not_come_and_each_is_accounted_for() -> None:
    rig = await a_rig(
        optimisation={"steps": STEPS, "groups_per_mini_batch": GROUPS},
        asynchrony={"redundant_groups": REDUNDANT_GROUPS, "on_max_lag": "drop"},
    )
    plane, gate, episodes = rig.experiment.train, VersionGate(), SomeNeverAnswer()
    await gate.set(0)
    trained: Counter[int] = Counter()
    async with asyncio.timeout(60), a_fleet(rig, gate, episodes) as planner:
        for step in range(1, STEPS + 1):
            planned = await planner.groups_of(step, ROOT, never)
            trained.update(group.task.group_id for group in planned.groups)
            assert {version for each in planned.groups for version in each.version_range()} == {step - 1}
            assert (await plane.ledger()).balanced
            rig.commit(version=step)
            rig.experiment.changed.fire()
            await gate.announce(step)
            await gate.set(step)
        await planner._queue.commit(range(1, STEPS + 1))
        # A task that was on its way when the last version came is sampled by that: the experiment's end would end it.
        while any(version < STEPS for version in episodes.sampling.values()) or (
            (ledger := await plane.ledger()).claimed.tasks > len(episodes.sampling)
        ):
            await asyncio.sleep(0.01)
        num_ended = episodes.num_ended

    assert len(trained) == STEPS * GROUPS and set(trained.values()) == {1}
    assert not [group_id for group_id in trained if group_id % 3 == 0]
    assert ledger.balanced and ledger.trained == STEPS * GROUPS
    assert set(ledger.dropped) == {REDUNDANT} and not ledger.failed and not ledger.filtered
    assert ledger.dropped[REDUNDANT] >= num_ended > 0
    assert ledger.issued == ledger.trained + ledger.dropped[REDUNDANT] + ledger.outstanding
