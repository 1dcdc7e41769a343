"""What a rollout holds no more it stops to sample; a task that comes again to the same rollout is answered once."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from flotilla.services.rollout.consumer import LaneConfig, RolloutConsumer
from flotilla.services.rollout.engines.base import UNMIXED, GenerationRequest
from flotilla.services.rollout.engines.scripted import ScriptedEngine
from flotilla.services.rollout.episodes.single_turn import SingleTurnEpisodes
from flotilla.services.rollout.episodes.turns import Requests, Turns
from flotilla.services.rollout.weights.version import VersionGate
from flotilla.shared.config.sections.rollout import SamplingConfig
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.models.prompts import PromptLimit
from flotilla.shared.schemas.task import Lane, Message
from flotilla.shared.streams.hop import HopName, StreamsConfig
from flotilla.shared.streams.ledger import Ledger
from flotilla.shared.streams.memory.plane import MemoryDataPlane
from flotilla.shared.testing.builders import a_task

LEASE_SECONDS = 0.2


class Numbers:
    stop_token_ids = ()

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return (5, 6, 7)

    def text(self, token_ids: Sequence[int], *, with_special_tokens: bool = False) -> str:
        return " ".join(map(str, token_ids))


class World:
    """A rollout with a scripted engine that samples nothing until it is told to."""

    def __init__(
        self,
        lane: Lane = Lane.TRAIN,
        *,
        task_seconds: float = 30.0,
        limit: int | None = None,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        self.plane = MemoryDataPlane(lane, StreamsConfig(lease_seconds=lease_seconds))
        self.engine = ScriptedEngine(eos_token_id=999, slots=4)
        self.engine.pause()
        self.gate = VersionGate()
        sampling = SamplingConfig(max_new_tokens=5)
        turns = Turns(sampling, sampling, PromptLimit(limit))
        self.episodes = SingleTurnEpisodes(self.engine, Numbers(), turns, UNMIXED)
        self.hop = self.plane.hop(HopName.TASKS, "rollout")
        config = LaneConfig(lane.value, max_groups=4, task_seconds=task_seconds)
        self.worker = RolloutConsumer([(config, self.hop)], self.episodes, self.gate, lambda _: None)

    async def until_in_engine(self, waiting: int) -> None:
        async with asyncio.timeout(5):
            while (await self.engine.load()).waiting != waiting:
                await asyncio.sleep(0.001)

    async def until(self, **counts: int) -> Ledger:
        async with asyncio.timeout(5):
            while True:
                ledger = await self.plane.ledger()
                assert ledger.balanced
                assert not ledger.failed
                if all(getattr(ledger.waiting, name) == count for name, count in counts.items()):
                    return ledger
                await asyncio.sleep(0.001)


@asynccontextmanager
async def running(world: World) -> AsyncIterator[World]:
    await world.engine.start()
    await world.gate.set(0)
    world.worker.resume()
    task = asyncio.create_task(world.worker.run())
    try:
        yield world
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await world.engine.close()


@pytest.mark.parametrize("lane", list(Lane))
async def test_a_task_that_was_taken_from_a_rollout_and_comes_again_is_answered(lane: Lane) -> None:
    pinned = 0 if lane is Lane.EVALUATION else None
    async with running(World(lane)) as world:
        await world.plane.admission.issue(a_task(0, group_size=2, pinned_version=pinned), limit=1)
        await world.until_in_engine(waiting=2)
        (former,) = world.engine.request_ids

        # As the gateway does with those that it has not heard of for a while.
        assert await world.plane.release({world.hop.consumer}) == 1
        async with asyncio.timeout(5):
            while former in world.engine.request_ids or not world.engine.request_ids:
                await asyncio.sleep(0.001)
        world.engine.resume()

        ledger = await world.until(generated=1)
    assert (ledger.waiting.tasks, ledger.claimed.tasks, ledger.failed) == (0, 0, {})


async def test_a_task_that_comes_again_ends_its_former_request_at_once() -> None:
    async with running(World(lease_seconds=600.0)) as world:
        await world.plane.admission.issue(a_task(0, group_size=2), limit=1)
        await world.until_in_engine(waiting=2)
        (former,) = world.engine.request_ids

        await world.plane.release({world.hop.consumer})

        async with asyncio.timeout(5):
            while former in world.engine.request_ids or not world.engine.request_ids:
                await asyncio.sleep(0.001)
        world.engine.resume()
        await world.until(generated=1)


async def test_what_is_held_no_more_is_ended_in_the_engine() -> None:
    async with running(World()) as world:
        await world.plane.admission.issue(a_task(0, group_size=3), limit=1)
        await world.until_in_engine(waiting=3)
        world.worker.pause()

        await world.plane.release({world.hop.consumer})

        await world.until_in_engine(waiting=0)
        assert (await world.until(tasks=1)).claimed.tasks == 0
        async with asyncio.timeout(5):
            while world.worker.in_work:
                await asyncio.sleep(0.001)


async def test_waiting_for_a_version_is_not_sampling() -> None:
    """A publication that takes longer than a task may be sampled fails no task."""
    async with running(World(task_seconds=0.05)) as world:
        world.engine.resume()
        await world.plane.admission.issue(a_task(0, min_version=1), limit=1)
        async with asyncio.timeout(5):
            while not world.worker.in_work:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.1)

        world.engine.version = 1
        await world.gate.set(1)

        assert not (await world.until(generated=1)).failed


class Refusing(ScriptedEngine):
    """Refuses every request for something else than its length."""

    async def generate(self, request: GenerationRequest) -> list:  # type: ignore[type-arg]
        raise InvalidRequest("stop strings need a tokenizer, and this model has none")


@pytest.mark.parametrize("reason", ["prompt_too_long", "invalid_request"])
async def test_a_task_fails_under_the_reason_that_it_has(reason: str) -> None:
    world = World(limit=2 if reason == "prompt_too_long" else None)
    if reason == "invalid_request":
        world.episodes._requests = Requests(Refusing())
    async with running(world):
        await world.plane.admission.issue(a_task(0), limit=1)
        async with asyncio.timeout(5):
            while not (ledger := await world.plane.ledger()).failed:
                await asyncio.sleep(0.001)

    assert ledger.failed == {reason: 1}


async def test_a_task_of_another_schema_fails_and_the_next_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.engine.resume()
    with monkeypatch.context() as earlier:
        earlier.setattr("flotilla.shared.schemas.task.TASK_SCHEMA", 0)
        await world.plane.admission.issue(a_task(0), limit=2)
    await world.plane.admission.issue(a_task(1), limit=2)

    async with running(world):
        async with asyncio.timeout(5):
            while (ledger := await world.plane.ledger()).waiting.generated != 1:
                await asyncio.sleep(0.001)

    assert ledger.failed == {"unreadable": 1}
