"""A reward that is told to leave grades what it has in hand; a start that fails for a passing reason is tried again."""

import asyncio
from collections.abc import Callable

import pytest

from flotilla.services.reward import service as service_module
from flotilla.services.reward.service import RewardService
from flotilla.services.reward.tally import GradingTally
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import FlotillaError, Unavailable, WorkerDied
from flotilla.shared.schemas.service import TEACHER, Assignment, DesiredState, Failure, WorkState
from flotilla.shared.service import reconciling

SPEC = {
    "name": "trial",
    "model": {"path": "model"},
    "data": {"path": "train.jsonl"},
    "reward": {"components": [{"kind": "numeric"}]},
    "optimisation": {"steps": 3},
}


class ScriptedSession:
    """Worker and verifier in one; works until it is cancelled."""

    def __init__(self) -> None:
        self.worker = self
        self.in_work, self.graded_samples, self.failed_samples = 2, 0, 0
        self.why_hopeless: str | None = None
        self.problem: Failure | None = None
        self.is_claiming = self.is_closed = False
        self.tally = GradingTally()
        self.graders: dict[str, object] = {}

    async def run(self) -> None:
        await asyncio.Event().wait()

    def resume(self) -> None:
        self.is_claiming = True

    def pause(self) -> None:
        self.is_claiming = False

    async def close(self) -> None:
        self.is_closed = True


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(3):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_reward_that_drains_finishes_what_it_has_and_stays_finished() -> None:
    sessions: list[ScriptedSession] = []

    async def open_session(spec: ExperimentSpec, assignment: Assignment) -> ScriptedSession:
        sessions.append(ScriptedSession())
        return sessions[-1]

    async def want(state: WorkState) -> None:
        assignment = Assignment(experiment_id="e1", revision=1, spec=SPEC, directory="/data")
        await service.apply(DesiredState(tag=state.value, state=state, assignment=assignment))

    service = RewardService(open_session)  # type: ignore[arg-type]
    running = asyncio.create_task(service.run())
    await want(WorkState.RUNNING)
    await until(lambda: sessions and sessions[0].is_claiming)

    await want(WorkState.DRAINING)
    await until(lambda: service.observe().state is WorkState.DRAINING)
    assert not sessions[0].is_claiming and not sessions[0].is_closed
    # A notice that is taken back in time costs nothing.
    await want(WorkState.RUNNING)
    await until(lambda: sessions[0].is_claiming)
    await want(WorkState.DRAINING)
    await until(lambda: not sessions[0].is_claiming)
    sessions[0].in_work = 0

    await until(lambda: service.observe().state is WorkState.FINISHED)
    assert sessions[0].is_closed
    assert service.observe().experiment_id == "e1"
    await want(WorkState.DRAINING)
    await asyncio.sleep(0.01)
    assert len(sessions) == 1 and service.observe().state is WorkState.FINISHED
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize(
    "refusal", [Unavailable("the fleet has no sandbox now"), WorkerDied("it was ended by SIGKILL")]
)
async def test_a_start_that_failed_for_a_passing_reason_is_tried_again_and_reported_meanwhile(
    monkeypatch: pytest.MonkeyPatch, refusal: FlotillaError
) -> None:
    monkeypatch.setattr(reconciling, "FIRST_PAUSE_SECONDS", 0.05)
    refusals = [refusal]

    async def open_session(spec: ExperimentSpec, assignment: Assignment) -> ScriptedSession:
        if refusals:
            raise refusals.pop()
        return ScriptedSession()

    service = RewardService(open_session)  # type: ignore[arg-type]
    running = asyncio.create_task(service.run())
    assignment = Assignment(experiment_id="e1", revision=1, spec=SPEC, directory="/data")
    await service.apply(DesiredState(tag="1", state=WorkState.RUNNING, assignment=assignment))

    await until(lambda: service.observe().failure is not None)
    failure = service.observe().failure
    assert failure is not None
    assert (failure.fatal, failure.cause) == (False, refusal.detail)

    await until(lambda: service.observe().state is WorkState.RUNNING)
    assert service.observe().failure is None
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_who_is_waited_for_outside_of_the_fleet_is_reported_until_they_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service_module, "WATCH_SECONDS", 0.001)
    session = ScriptedSession()

    async def open_session(spec: ExperimentSpec, assignment: Assignment) -> ScriptedSession:
        return session

    notices: list[Failure | None] = []
    service = RewardService(open_session)  # type: ignore[arg-type]
    service.notify = lambda: notices.append(service.observe().failure)
    running = asyncio.create_task(service.run())
    assignment = Assignment(experiment_id="e1", revision=1, spec=SPEC, directory="/data")
    await service.apply(DesiredState(tag="1", state=WorkState.RUNNING, assignment=assignment))
    await until(lambda: session.is_claiming)

    silent = session.problem = Failure(component=TEACHER, cause="the teacher does not answer", fatal=False)
    await until(lambda: any(notices))
    session.problem = None
    await until(lambda: notices[-1] is None)

    assert silent in notices
    assert service.observe().state is WorkState.RUNNING
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
