"""A group that changes hands in the middle is the group that one rollout would have sampled."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np

from flotilla.services.rollout.consumer import LaneConfig, RolloutConsumer
from flotilla.services.rollout.engines.base import ResumeRule
from flotilla.services.rollout.engines.scripted import ScriptedEngine
from flotilla.services.rollout.episodes.single_turn import SingleTurnEpisodes
from flotilla.services.rollout.episodes.turns import Turns
from flotilla.services.rollout.weights.version import VersionGate
from flotilla.shared.config.sections.rollout import SamplingConfig
from flotilla.shared.schemas.task import Message, Task
from flotilla.shared.schemas.trajectory import FinishReason, Group
from flotilla.shared.streams.hop import HopName
from flotilla.shared.streams.memory.plane import MemoryDataPlane
from flotilla.shared.testing.builders import a_task

LENGTH = 400
MIXING = ResumeRule(mixes_versions=True, max_lag=2)


class Numbers:
    """Renders a prompt as three numbers."""

    stop_token_ids = ()

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return (5, 6, 7)

    def text(self, token_ids: Sequence[int], *, with_special_tokens: bool = False) -> str:
        return " ".join(map(str, token_ids))


class Rollout:
    """A worker with a scripted engine of its own."""

    def __init__(self, plane: MemoryDataPlane, name: str, version: int, rule: ResumeRule) -> None:
        self.engine = ScriptedEngine(version=version, eos_token_id=999, slots=4)
        self.gate = VersionGate()
        sampling = SamplingConfig(max_new_tokens=LENGTH)
        self.episodes = SingleTurnEpisodes(self.engine, Numbers(), Turns(sampling, sampling), rule)
        lanes = [(LaneConfig(name, max_groups=4, task_seconds=30), plane.hop(HopName.TASKS, name))]
        self.worker = RolloutConsumer(lanes, self.episodes, self.gate, lambda _: None)

    async def until_sampled(self, tokens: int) -> None:
        async with asyncio.timeout(5):
            while (await self.engine.load()).generated_tokens < tokens:
                await asyncio.sleep(0)


@asynccontextmanager
async def rollout(
    plane: MemoryDataPlane, name: str, version: int = 0, rule: ResumeRule = MIXING
) -> AsyncIterator[Rollout]:
    made = Rollout(plane, name, version, rule)
    await made.engine.start()
    await made.gate.set(version)
    made.worker.resume()
    running = asyncio.create_task(made.worker.run())
    try:
        yield made
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await made.engine.close()


async def interrupted(
    plane: MemoryDataPlane, after_tokens: int, version: int = 0, rule: ResumeRule = MIXING
) -> Rollout:
    """Let a rollout sample so many tokens, and hand over."""
    async with rollout(plane, "first", version, rule) as first:
        await first.until_sampled(after_tokens)
        await first.worker.interrupt()
        async with asyncio.timeout(5):
            while first.worker.in_work:
                await asyncio.sleep(0)
        ledger = await plane.ledger()
        assert (ledger.balanced, ledger.claimed.tasks, ledger.waiting.tasks) == (True, 0, ledger.issued)
    return first


async def answered(plane: MemoryDataPlane) -> Group:
    (claim,) = await plane.hop(HopName.GENERATED, "reward").claim(wait_seconds=5)
    return claim.group()


async def uninterrupted(task: Task, version: int = 0) -> Group:
    plane = MemoryDataPlane()
    await plane.admission.issue(task, limit=1)
    async with rollout(plane, "alone", version):
        return await answered(plane)


async def test_the_next_rollout_goes_on_from_the_tokens() -> None:
    plane, task = MemoryDataPlane(), a_task(0, group_size=6)
    await plane.admission.issue(task, limit=1)
    first = await interrupted(plane, after_tokens=LENGTH * 4 + 200)

    async with rollout(plane, "second") as second:
        group = await answered(plane)
        sampled = (await second.engine.load()).generated_tokens

    whole = await uninterrupted(task)
    for member, expected in zip(group.trajectories, whole.trajectories, strict=True):
        assert member.token_ids.tolist() == expected.token_ids.tolist()
        assert member.log_probs.tolist() == expected.log_probs.tolist()
        assert (member.versions, member.text) == (expected.versions, expected.text)
        assert member.finish_reason is FinishReason.LENGTH
    resumed = [member.resumed_tokens for member in group.trajectories]
    assert resumed[:4] == [LENGTH] * 4, "finished members are not sampled again"
    assert all(0 < each < LENGTH for each in resumed[4:])
    kept = first.worker.counts.tokens_handed_over
    assert kept == sum(resumed) == second.worker.counts.tokens_resumed
    assert second.worker.counts.tokens_restarted == 0
    assert sampled == 6 * LENGTH - kept


async def test_tokens_keep_the_version_that_sampled_them() -> None:
    plane, task = MemoryDataPlane(), a_task(0, group_size=2)
    await plane.admission.issue(task, limit=1)
    await interrupted(plane, after_tokens=100, version=1)

    async with rollout(plane, "second", version=2):
        group = await answered(plane)

    old = await uninterrupted(task, version=1)
    for member, before in zip(group.trajectories, old.trajectories, strict=True):
        num = member.resumed_tokens
        assert num > 0
        assert member.versions == ((0, 1), (3 + num, 2))
        assert member.token_ids[: 3 + num].tolist() == before.token_ids[: 3 + num].tolist()
        assert member.num_sampled == LENGTH


async def test_where_versions_may_not_mix_it_starts_afresh_and_is_counted() -> None:
    plane, task = MemoryDataPlane(), a_task(0, group_size=2)
    await plane.admission.issue(task, limit=1)
    first = await interrupted(plane, after_tokens=100, version=1, rule=ResumeRule())

    async with rollout(plane, "second", version=2, rule=ResumeRule()) as second:
        group = await answered(plane)
        counts = second.worker.counts

    expected = await uninterrupted(task, version=2)
    assert [each.token_ids.tolist() for each in group.trajectories] == [
        each.token_ids.tolist() for each in expected.trajectories
    ]
    assert counts.tokens_restarted == first.worker.counts.tokens_handed_over > 0
    assert counts.tokens_resumed == 0


async def test_a_pinned_task_goes_on_under_its_version_alone() -> None:
    plane, task = MemoryDataPlane(), a_task(0, group_size=2, pinned_version=3, min_version=3)
    await plane.admission.issue(task, limit=1)
    await interrupted(plane, after_tokens=100, version=3)

    async with rollout(plane, "second", version=3):
        group = await answered(plane)

    assert all(member.resumed_tokens for member in group.trajectories)
    assert {member.versions for member in group.trajectories} == {((0, 3),)}


async def test_it_waits_for_the_version_of_the_tokens() -> None:
    plane, task = MemoryDataPlane(), a_task(0, group_size=2)
    await plane.admission.issue(task, limit=1)
    await interrupted(plane, after_tokens=100, version=2, rule=ResumeRule())

    async with rollout(plane, "late", version=1, rule=ResumeRule()) as late:
        await asyncio.sleep(0.02)
        assert (await late.engine.load()).generated_tokens == 0
        late.engine.version = 2
        await late.gate.set(2)
        group = await answered(plane)

    assert all(member.resumed_tokens for member in group.trajectories)


async def test_a_task_that_changes_hands_twice_loses_nothing() -> None:
    plane, task = MemoryDataPlane(), a_task(0, group_size=3)
    await plane.admission.issue(task, limit=1)
    await interrupted(plane, after_tokens=100)
    await interrupted(plane, after_tokens=100)

    async with rollout(plane, "third"):
        group = await answered(plane)

    whole = await uninterrupted(task)
    assert [each.token_ids.tolist() for each in group.trajectories] == [
        each.token_ids.tolist() for each in whole.trajectories
    ]
    assert min(each.resumed_tokens for each in group.trajectories) > 60


async def test_what_waits_for_a_version_is_handed_back_at_once() -> None:
    plane = MemoryDataPlane()
    await plane.admission.issue(a_task(0, min_version=5), limit=1)
    async with rollout(plane, "waiting", version=1) as waiting:
        async with asyncio.timeout(5):
            while not waiting.worker.in_work:
                await asyncio.sleep(0)
            await waiting.worker.interrupt()
            while waiting.worker.in_work:
                await asyncio.sleep(0)

    ledger = await plane.ledger()
    assert (ledger.waiting.tasks, ledger.claimed.tasks) == (1, 0)


async def test_tokens_come_back_as_the_wire_had_them() -> None:
    plane, task = MemoryDataPlane(), a_task(0, group_size=2)
    await plane.admission.issue(task, limit=1)
    await interrupted(plane, after_tokens=60)

    (claim,) = await plane.hop(HopName.TASKS, "reader").claim(wait_seconds=0)

    for member in claim.partials():
        assert member is not None
        assert member.finish_reason is FinishReason.ABORTED
        assert member.log_probs.dtype == np.float32
        assert member.token_ids[:3].tolist() == [5, 6, 7]
