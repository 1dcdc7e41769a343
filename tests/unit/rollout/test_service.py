"""The service follows what is desired; an engine that dies is replaced until that proves hopeless."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

import flotilla.services.rollout.service as rollout_service
from flotilla.services.rollout import service as shutdown
from flotilla.services.rollout.consumer import BusyTime, HandOverCounts
from flotilla.services.rollout.engines.base import EngineLoad
from flotilla.services.rollout.episodes.special_tokens import SamplingTally
from flotilla.services.rollout.service import HAND_OVER_SECONDS, MAX_DEATHS, RolloutService
from flotilla.services.rollout.weights.version import VersionGate
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import (
    DeadlineExceeded,
    ModelError,
    ServerUnreachable,
    Unavailable,
    WeightTransferFailed,
    WorkerDied,
)
from flotilla.shared.schemas.service import Assignment, DesiredState, DeviceOrder, DeviceReport, Failure, WorkState
from flotilla.shared.service import reconciling

SPEC = {
    "name": "trial",
    "model": {"path": "model"},
    "data": {"path": "train.jsonl"},
    "reward": {"components": [{"kind": "numeric"}]},
    "optimisation": {"steps": 3},
}


class ScriptedSession:
    """Engine, worker and receiver in one; works until it is cancelled."""

    def __init__(self, answered: int = 0) -> None:
        self.engine = self.worker = self.receiver = self
        self.gate = VersionGate()
        self.answered, self.in_work, self.switches, self.report = answered, 0, 0, None
        self.held_image = None
        self.refusal: str | None = None
        self.served = None
        self.is_claiming = self.is_closed = self.is_interrupted = self.is_asleep = False
        self.sleeps_forever = self.ends_nothing = False
        self.counts = HandOverCounts()
        self.busy = BusyTime()
        self.tally = SamplingTally()
        self.agents: SimpleNamespace | None = None
        self.why_hopeless: str | None = None

    @property
    def is_idle(self) -> bool:
        return not self.in_work

    async def interrupt(self) -> None:
        self.is_interrupted = True
        if self.ends_nothing:
            await asyncio.Event().wait()
        self.in_work = 0

    async def load(self) -> EngineLoad:
        return EngineLoad(0, 0, 0, 1, 0, 0)

    async def run(self) -> None:
        await asyncio.Event().wait()

    def take(self, desired: DesiredState) -> None:
        return None

    @property
    def version(self) -> int | None:
        return self.gate.version

    async def sleep(self) -> None:
        if self.sleeps_forever:
            raise DeadlineExceeded("it does not answer")
        self.is_asleep = True

    def wake(self) -> None:
        self.is_asleep = False

    def resume(self) -> None:
        self.is_claiming = True

    def pause(self) -> None:
        self.is_claiming = False

    async def close(self) -> None:
        self.is_closed = True


class World:
    def __init__(self) -> None:
        self.sessions: list[ScriptedSession] = []
        self.refusals: list[Exception] = []
        self.answered = 0
        self.agents: SimpleNamespace | None = None
        self.on_death: Callable[[WorkerDied], None] | None = None
        self.running: asyncio.Task[None] | None = None
        self.service = RolloutService(self.open_session)  # type: ignore[arg-type]

    async def open_session(
        self, spec: ExperimentSpec, assignment: Assignment, tell: Any, on_death: Any
    ) -> ScriptedSession:
        if self.refusals:
            raise self.refusals.pop()
        self.on_death = on_death
        self.sessions.append(ScriptedSession(self.answered))
        self.sessions[-1].agents = self.agents
        return self.sessions[-1]

    async def want(
        self,
        state: WorkState,
        experiment_id: str | None = "e1",
        notice_seconds: float | None = None,
        device: DeviceOrder | None = None,
    ) -> None:
        assignment = None
        if experiment_id is not None:
            assignment = Assignment(experiment_id=experiment_id, revision=1, spec=SPEC, directory="/data")
        desired = DesiredState(
            tag=state.value, state=state, assignment=assignment, notice_seconds=notice_seconds, device=device
        )
        await self.service.apply(desired)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(3):
            while not condition():
                await asyncio.sleep(0.001)

    def is_in(self, state: WorkState) -> bool:
        return self.service.observe().state is state


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_service, "FIRST_PAUSE_SECONDS", 0.0)


@asynccontextmanager
async def a_world() -> AsyncIterator[World]:
    world = World()
    world.running = asyncio.create_task(world.service.run())
    try:
        yield world
    finally:
        world.running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await world.running
    assert all(session.is_closed for session in world.sessions)


async def test_it_works_pauses_and_falls_idle_as_it_is_told() -> None:
    async with a_world() as world:
        await world.want(WorkState.RUNNING)
        await world.until(lambda: world.is_in(WorkState.RUNNING) and world.sessions[0].is_claiming)

        await world.want(WorkState.PAUSED)
        await world.until(lambda: world.is_in(WorkState.PAUSED) and not world.sessions[0].is_claiming)

        await world.want(WorkState.IDLE, None)
        await world.until(lambda: world.is_in(WorkState.IDLE) and world.sessions[0].is_closed)


class ScriptedAgent:
    def __init__(self) -> None:
        self.failure: Failure | None = None
        self.is_running = False

    async def run(self) -> None:
        self.is_running = True
        try:
            await asyncio.Event().wait()
        finally:
            self.is_running = False


@pytest.mark.parametrize("is_fatal", [False, True])
async def test_an_agent_that_is_started_here_runs_with_the_session_and_its_death_is_reported(is_fatal: bool) -> None:
    async with a_world() as world:
        agent = ScriptedAgent()
        world.agents = SimpleNamespace(environment=agent, to_load=dict)
        await world.want(WorkState.RUNNING)
        await world.until(lambda: world.is_in(WorkState.RUNNING) and agent.is_running)
        assert world.service.observe().failure is None

        agent.failure = Failure(component="agents", cause="it ended", fatal=is_fatal)
        assert world.service.observe().failure == agent.failure
        agent.failure = None
        assert world.service.observe().failure is None

        await world.want(WorkState.IDLE, None)
        await world.until(lambda: world.is_in(WorkState.IDLE))
        assert not agent.is_running


async def test_another_experiment_gets_a_session_of_its_own() -> None:
    async with a_world() as world:
        await world.want(WorkState.RUNNING, "e1")
        await world.until(lambda: world.is_in(WorkState.RUNNING))

        await world.want(WorkState.RUNNING, "e2")

        await world.until(lambda: len(world.sessions) == 2 and world.service.observe().experiment_id == "e2")
        assert world.sessions[0].is_closed


async def test_a_model_that_cannot_be_loaded_is_fatal() -> None:
    async with a_world() as world:
        world.refusals = [ModelError("no config.json")]
        await world.want(WorkState.RUNNING)

        await world.until(lambda: world.is_in(WorkState.FAILED))

        failure = world.service.observe().failure
        assert failure is not None
        assert (failure.fatal, failure.cause) == (True, "no config.json")


async def test_tasks_that_all_fail_are_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_service, "LOOK_SECONDS", 0.001)
    async with a_world() as world:
        await world.want(WorkState.RUNNING)
        await world.until(lambda: world.is_in(WorkState.RUNNING))

        world.sessions[0].why_hopeless = "32 tasks in a row could not be answered"
        await world.until(lambda: world.is_in(WorkState.FAILED))

        failure = world.service.observe().failure
        assert failure is not None
        assert (failure.component, failure.fatal) == ("rollout", True)
        assert failure.cause.startswith("32 tasks in a row")
        assert not world.sessions[0].is_claiming


async def test_an_engine_killed_while_it_loads_is_started_again() -> None:
    async with a_world() as world:
        world.refusals = [WorkerDied("killed by SIGKILL")]
        await world.want(WorkState.RUNNING)

        await world.until(lambda: world.is_in(WorkState.RUNNING))
        assert world.service.observe().failure is None


async def test_a_start_that_failed_for_a_passing_reason_is_tried_again_and_reported_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with a_world() as world:
        monkeypatch.setattr(reconciling, "FIRST_PAUSE_SECONDS", 0.05)
        world.refusals = [DeadlineExceeded("starting the weight endpoint took more than 60 s")]
        await world.want(WorkState.RUNNING)

        await world.until(lambda: world.service.observe().failure is not None)
        failure = world.service.observe().failure
        assert failure is not None
        assert (failure.fatal, failure.cause) == (False, "starting the weight endpoint took more than 60 s")
        assert world.is_in(WorkState.STARTING)

        await world.until(lambda: world.is_in(WorkState.RUNNING))
        assert world.service.observe().failure is None


async def test_a_start_whose_parts_failed_leaves_no_cancellation_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python leaves one in a task whose group failed; before 3.11.3 its next timeout would end as a cancellation."""

    async def fail() -> None:
        await asyncio.sleep(0)
        raise Unavailable("the disk is full")

    async def open_parts(*_: Any) -> ScriptedSession:
        try:
            async with asyncio.TaskGroup() as parts:
                parts.create_task(fail())
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        pytest.fail("a part fails")

    async with a_world() as world:
        monkeypatch.setattr(reconciling, "FIRST_PAUSE_SECONDS", 60.0)
        world.service._open_session = open_parts  # type: ignore[assignment]
        await world.want(WorkState.RUNNING)

        await world.until(lambda: world.service.observe().failure is not None)

        assert world.running is not None
        assert world.running.cancelling() == 0


async def test_a_session_that_opens_as_the_service_ends_is_closed() -> None:
    may_open = asyncio.Event()
    async with a_world() as world:
        open_session = world.service._open_session

        async def open_late(*given: Any) -> Any:
            await may_open.wait()
            return await open_session(*given)

        world.service._open_session = open_late
        await world.want(WorkState.RUNNING)
        await world.until(lambda: world.is_in(WorkState.STARTING))
        for _ in range(10):
            await asyncio.sleep(0)

        may_open.set()
        await asyncio.sleep(0)  # the session is open, and the service is about to hear of it
        assert world.sessions and world.running is not None
        world.running.cancel()
        await asyncio.wait([world.running])

        assert world.sessions[0].is_closed


async def test_a_start_is_tried_again_as_often_as_its_reason_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_world() as world:
        monkeypatch.setattr(reconciling, "FIRST_PAUSE_SECONDS", 0.0)
        world.refusals = [Unavailable("the disk is full")] * (3 * MAX_DEATHS)
        await world.want(WorkState.RUNNING)

        await world.until(lambda: world.is_in(WorkState.RUNNING))

        assert not world.refusals


async def test_a_pause_before_the_next_start_ends_with_the_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_world() as world:
        monkeypatch.setattr(reconciling, "FIRST_PAUSE_SECONDS", 60.0)
        world.refusals = [Unavailable("the disk is full")]
        await world.want(WorkState.RUNNING)
        await world.until(lambda: world.service.observe().failure is not None)

        await world.want(WorkState.RUNNING, "e2")

        await world.until(lambda: world.is_in(WorkState.RUNNING))
        assert world.service.observe().experiment_id == "e2"
        assert world.service.observe().failure is None


async def test_a_weight_endpoint_killed_while_it_starts_is_started_again() -> None:
    async with a_world() as world:
        world.refusals = [WeightTransferFailed("the weight endpoint ended")]
        await world.want(WorkState.RUNNING)

        await world.until(lambda: world.is_in(WorkState.RUNNING))
        assert world.service.observe().failure is None


async def test_an_engine_that_keeps_dying_without_an_answer_is_fatal() -> None:
    async with a_world() as world:
        await world.want(WorkState.RUNNING)
        for number in range(1, MAX_DEATHS + 1):
            await world.until(lambda n=number: len(world.sessions) == n and world.is_in(WorkState.RUNNING))
            assert world.on_death is not None
            world.on_death(WorkerDied("out of memory"))

        await world.until(lambda: world.is_in(WorkState.FAILED))

        failure = world.service.observe().failure
        assert failure is not None
        assert (failure.fatal, failure.cause) == (True, "out of memory")


async def test_somebody_elses_server_may_be_away_as_often_as_he_likes() -> None:
    async with a_world() as world:
        await world.want(WorkState.RUNNING)
        for number in range(1, 2 * MAX_DEATHS):
            await world.until(lambda n=number: len(world.sessions) == n and world.is_in(WorkState.RUNNING))
            assert world.on_death is not None
            world.on_death(ServerUnreachable("it cannot be reached"))

        await world.until(lambda: len(world.sessions) == 2 * MAX_DEATHS and world.is_in(WorkState.RUNNING))
        assert world.service.observe().failure is None


async def test_a_death_that_is_told_by_many_is_one_death() -> None:
    async with a_world() as world:
        await world.want(WorkState.RUNNING)
        for number in range(1, MAX_DEATHS):
            await world.until(lambda n=number: len(world.sessions) == n and world.is_in(WorkState.RUNNING))
            tell = world.on_death
            assert tell is not None

            async def close(session: ScriptedSession = world.sessions[-1], tell: Any = tell) -> None:
                # Whoever asked the engine last hears of its death as it is closed.
                tell(WorkerDied("the engine was closed"))
                session.is_closed = True

            world.sessions[-1].close = close  # type: ignore[method-assign]
            tell(WorkerDied("out of memory"))
            await world.until(lambda n=number: len(world.sessions) > n or world.is_in(WorkState.FAILED))

        await world.until(lambda: len(world.sessions) == MAX_DEATHS and world.is_in(WorkState.RUNNING))
        assert world.service.observe().failure is None


async def test_a_look_at_an_engine_that_was_replaced_meanwhile_tells_of_no_death(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rollout_service, "LOOK_SECONDS", 0.001)
    async with a_world() as world:
        await world.want(WorkState.RUNNING)
        await world.until(lambda: world.is_in(WorkState.RUNNING))
        first, asked, is_dead = world.sessions[0], asyncio.Event(), asyncio.Event()

        async def load() -> EngineLoad:
            asked.set()
            await is_dead.wait()
            raise WorkerDied("out of memory")

        first.load = load  # type: ignore[method-assign]
        await asked.wait()
        assert world.on_death is not None
        world.on_death(WorkerDied("out of memory"))
        await world.until(lambda: len(world.sessions) == 2 and world.is_in(WorkState.RUNNING))

        is_dead.set()
        await asyncio.sleep(0.02)

        assert len(world.sessions) == 2
        assert not world.sessions[1].is_closed


async def test_an_engine_that_answers_between_its_deaths_is_always_replaced() -> None:
    async with a_world() as world:
        world.answered = 1
        await world.want(WorkState.RUNNING)
        for number in range(1, 2 * MAX_DEATHS):
            await world.until(lambda n=number: len(world.sessions) == n and world.is_in(WorkState.RUNNING))
            assert world.on_death is not None
            world.on_death(WorkerDied("killed by SIGKILL"))

        await world.until(lambda: len(world.sessions) == 2 * MAX_DEATHS and world.is_in(WorkState.RUNNING))


async def a_busy_world(world: World) -> ScriptedSession:
    await world.want(WorkState.RUNNING)
    await world.until(lambda: world.is_in(WorkState.RUNNING))
    world.sessions[0].in_work = 1
    return world.sessions[0]


async def test_a_draining_service_finishes_what_it_has_within_its_notice() -> None:
    async with a_world() as world:
        session = await a_busy_world(world)
        await world.want(WorkState.DRAINING, notice_seconds=60.0)
        await world.until(lambda: world.is_in(WorkState.DRAINING) and not session.is_claiming)
        await asyncio.sleep(0.05)
        assert not (session.is_interrupted or session.is_closed)

        session.in_work = 0

        await world.until(lambda: world.is_in(WorkState.FINISHED) and session.is_closed)
        assert not session.is_interrupted


async def test_a_notice_that_ends_interrupts_the_work() -> None:
    async with a_world() as world:
        session = await a_busy_world(world)
        wanted_at = time.monotonic()
        await world.want(WorkState.DRAINING, notice_seconds=HAND_OVER_SECONDS + 0.1)

        await world.until(lambda: session.is_interrupted)

        assert time.monotonic() >= wanted_at + 0.1, "not before that"
        await world.until(lambda: world.is_in(WorkState.FINISHED))


async def test_an_engine_that_ends_no_request_keeps_nobody_from_leaving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "HAND_OVER_SECONDS", 0.05)
    async with a_world() as world:
        session = await a_busy_world(world)
        session.ends_nothing = True

        await world.want(WorkState.DRAINING, notice_seconds=0.0)

        await world.until(lambda: world.is_in(WorkState.FINISHED) and session.is_closed)


async def test_news_while_it_drains_do_not_prolong_the_notice() -> None:
    async with a_world() as world:
        session = await a_busy_world(world)
        await world.want(WorkState.DRAINING, notice_seconds=HAND_OVER_SECONDS + 0.1)
        for _ in range(5):
            await world.want(WorkState.DRAINING)
            await asyncio.sleep(0.01)

        await world.until(lambda: world.is_in(WorkState.FINISHED))
        assert session.is_interrupted


async def test_a_drain_that_is_taken_back_lets_it_work_on() -> None:
    async with a_world() as world:
        session = await a_busy_world(world)
        await world.want(WorkState.DRAINING, notice_seconds=60.0)
        await world.until(lambda: world.is_in(WorkState.DRAINING))

        await world.want(WorkState.RUNNING)

        await world.until(lambda: world.is_in(WorkState.RUNNING) and session.is_claiming)


async def test_a_service_that_was_released_from_its_drain_ends() -> None:
    async with a_world() as world:
        await a_busy_world(world)
        await world.want(WorkState.DRAINING, notice_seconds=0.0)
        await world.until(lambda: world.is_in(WorkState.FINISHED))

        await world.want(WorkState.DRAINING, None)

        assert world.running is not None
        await world.until(world.running.done)


async def test_a_released_service_that_is_not_drained_for_good_waits_for_other_work() -> None:
    async with a_world() as world:
        await a_busy_world(world)
        await world.want(WorkState.DRAINING, notice_seconds=0.0)
        await world.until(lambda: world.is_in(WorkState.FINISHED))

        await world.want(WorkState.IDLE, None)
        await world.until(lambda: world.is_in(WorkState.IDLE))

        await world.want(WorkState.RUNNING, "e2")
        await world.until(lambda: world.is_in(WorkState.RUNNING) and len(world.sessions) == 2)


async def test_a_signal_drains_whatever_the_gateway_says_and_ends_the_service() -> None:
    async with a_world() as world:
        session = await a_busy_world(world)

        leaving = asyncio.create_task(world.service.leave(0.0))
        await world.want(WorkState.RUNNING)

        async with asyncio.timeout(3):
            await leaving
        assert session.is_interrupted
        assert world.is_in(WorkState.FINISHED)
        assert world.running is not None
        await world.until(world.running.done)


async def test_a_signal_without_work_in_hand_waits_for_nothing() -> None:
    async with a_world() as world, asyncio.timeout(1):
        await world.service.leave(60.0)


async def test_another_experiment_takes_over_only_after_the_work_was_handed_over() -> None:
    async with a_world() as world:
        session = await a_busy_world(world)

        await world.want(WorkState.RUNNING, "e2")

        await world.until(lambda: world.service.observe().experiment_id == "e2")
        assert session.is_interrupted


def has_device(world: World, *, shift: int, held: bool) -> bool:
    return world.service.observe().device == DeviceReport(shift=shift, is_held=held)


async def test_an_engine_sleeps_while_others_have_the_device_and_wakes_in_its_shift() -> None:
    async with a_world() as world:
        await world.want(WorkState.RUNNING, device=DeviceOrder(shift=2, may_hold=True))
        await world.until(lambda: has_device(world, shift=2, held=True) and world.sessions[0].is_claiming)
        session = world.sessions[0]
        session.in_work = 1

        await world.want(WorkState.RUNNING, device=DeviceOrder(shift=3, may_hold=False))
        await world.until(lambda: has_device(world, shift=3, held=False))
        assert (session.is_asleep, session.is_interrupted, session.in_work) == (True, True, 0)

        session.is_claiming = False
        await world.want(WorkState.RUNNING, device=DeviceOrder(shift=4, may_hold=True))
        await world.until(lambda: has_device(world, shift=4, held=True) and session.is_claiming)
        assert not session.is_asleep
        assert world.sessions == [session]


async def test_an_engine_that_ends_no_request_is_put_to_sleep_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "HAND_OVER_SECONDS", 0.05)
    async with a_world() as world:
        await world.want(WorkState.RUNNING, device=DeviceOrder(shift=2, may_hold=True))
        await world.until(lambda: has_device(world, shift=2, held=True))
        session = world.sessions[0]
        session.in_work, session.ends_nothing = 1, True

        await world.want(WorkState.RUNNING, device=DeviceOrder(shift=3, may_hold=False))

        await world.until(lambda: has_device(world, shift=3, held=False))


async def test_an_engine_starts_in_its_shift_and_not_before() -> None:
    async with a_world() as world:
        await world.want(WorkState.RUNNING, device=DeviceOrder(shift=1, may_hold=False))
        await world.until(lambda: has_device(world, shift=1, held=False) and world.is_in(WorkState.STARTING))
        assert world.sessions == []

        await world.want(WorkState.RUNNING, device=DeviceOrder(shift=2, may_hold=True))
        await world.until(lambda: has_device(world, shift=2, held=True) and world.is_in(WorkState.RUNNING))


async def test_an_engine_that_does_not_go_to_sleep_is_ended() -> None:
    async with a_world() as world:
        await world.want(WorkState.RUNNING)
        await world.until(lambda: world.is_in(WorkState.RUNNING))
        world.sessions[0].sleeps_forever = True

        await world.want(WorkState.RUNNING, device=DeviceOrder(shift=3, may_hold=False))

        await world.until(lambda: has_device(world, shift=3, held=False) and world.sessions[0].is_closed)
        assert len(world.sessions) == 1
