"""The supervisor starts, restarts and ends workers as the desired state says."""

import asyncio
import io
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from flotilla.services.trainer.supervisor.process import ExitStatus, environment_of
from flotilla.services.trainer.supervisor.served_images import ServedImages
from flotilla.services.trainer.supervisor.supervisor import MAX_DEATHS, Addresses, Supervisor
from flotilla.services.trainer.wire import Failed, Launch, Line, Order, Status
from flotilla.services.trainer.worker.run import WorkerProcess, describe_failure
from flotilla.shared.config.sections.parallelism import ParallelismConfig
from flotilla.shared.errors import DeadlineExceeded, FlotillaError, ModelError, Unavailable
from flotilla.shared.schemas.service import (
    WAITS_FOR_TURN,
    Assignment,
    DesiredState,
    DeviceOrder,
    DeviceReport,
    Failure,
    WorkState,
)
from flotilla.shared.service.reconciling import StartBackoff
from flotilla.shared.weights.pull.server import PublishedImages
from tests.unit.trainer.builders import a_spec

ADDRESSES = Addresses(
    gateway_url="http://g",
    redis_url="redis://r",
    host="127.0.0.1",
    log_level="INFO",
    log_format="json",
)


class FakeWorker:
    """A process that does what the test says."""

    def __init__(self, launch: Launch, on_message: Callable[[Any], None]) -> None:
        self.launch, self.say, self.pid = launch, on_message, 1
        self.orders: list[WorkState] = []
        self._ended: asyncio.Future[ExitStatus] = asyncio.get_running_loop().create_future()

    def tell(self, line: Line) -> None:
        if isinstance(line, Order):
            self.orders.append(line.state)
            if line.state in {WorkState.DRAINING, WorkState.IDLE}:
                self.end(0)

    def end(self, code: int, cause: str = "it ended", *, is_with_others: bool = False) -> None:
        if not self._ended.done():
            self._ended.set_result(ExitStatus(code, cause, is_with_others))

    @property
    def has_ended(self) -> bool:
        return self._ended.done()

    async def ended(self) -> ExitStatus:
        return await asyncio.shield(self._ended)

    async def stop(self, wait_seconds: float) -> None:
        await self.ended()

    async def kill(self) -> None:
        self.end(-9)


class Rig:
    def __init__(self) -> None:
        self.workers: list[FakeWorker] = []
        self.service_id = "trainer-1"
        self.supervisor = Supervisor(ADDRESSES, ServedImages(PublishedImages()), lambda: self.service_id, self._start)
        self.supervisor.notify = lambda: None

    async def _start(
        self, launch: Launch, parallelism: ParallelismConfig, on_message: Callable[[Any], None]
    ) -> FakeWorker:
        self.workers.append(FakeWorker(launch, on_message))
        return self.workers[-1]

    async def desire(self, state: WorkState, assignment: Assignment | None) -> None:
        await self.supervisor.apply(DesiredState(tag=str(id(state)), state=state, assignment=assignment))
        await asyncio.sleep(0.01)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(2):
            while not condition():
                await asyncio.sleep(0.001)

    @property
    def state(self) -> WorkState:
        return self.supervisor.observe().state


@asynccontextmanager
async def a_rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr("flotilla.services.trainer.supervisor.supervisor.FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr("flotilla.services.trainer.supervisor.supervisor.PAUSE_GROWTH", 1.0)
    rig = Rig()
    running = asyncio.create_task(rig.supervisor.run())
    yield rig
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def an_assignment(**fields: Any) -> Assignment:
    defaults: dict[str, Any] = {
        "experiment_id": "e",
        "revision": 1,
        "spec": a_spec().model_dump(mode="json"),
        "directory": "/nowhere",
        "trainer_epoch": 2,
        "token": "secret",
    }
    return Assignment(**(defaults | fields))


def a_status(state: WorkState = WorkState.RUNNING, **fields: Any) -> Status:
    return Status(**({"state": state, "step": 3, "version": 2} | fields))


async def test_an_assignment_starts_a_worker_and_its_status_is_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_rig(monkeypatch) as rig:
        await rig.desire(WorkState.RUNNING, an_assignment())
        rig.workers[0].say(a_status(load={"ready_groups": 2.0}))

        observed = rig.supervisor.observe()

        assert (observed.experiment_id, observed.state, observed.step, observed.policy_version) == (
            "e",
            WorkState.RUNNING,
            3,
            2,
        )
        assert observed.load["ready_groups"] == 2.0
        assert rig.workers[0].launch.assignment.token == "secret"
        assert rig.workers[0].launch.incarnation == 2_000_001


async def test_that_a_last_checkpoint_waits_for_others_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_rig(monkeypatch) as rig:
        await rig.desire(WorkState.RUNNING, an_assignment())
        await rig.until(lambda: bool(rig.workers))
        worker, told = rig.workers[0], list[bool]()
        worker.say(a_status())
        rig.supervisor.notify = lambda: told.append(WAITS_FOR_TURN in rig.supervisor.observe().load)
        orders: list[Line] = []
        monkeypatch.setattr(worker, "tell", orders.append)
        await rig.desire(WorkState.IDLE, None)
        await rig.until(lambda: bool(orders))

        for load in ({WAITS_FOR_TURN: 1.0}, {WAITS_FOR_TURN: 1.0}, {}):
            worker.say(a_status(load=load))
        assert told == [True, False]
        worker.end(0)
        await rig.until(lambda: rig.state is WorkState.IDLE)


async def test_steps_and_versions_are_told_together_and_the_first_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flotilla.services.trainer.supervisor.supervisor.NEWS_SECONDS", 0.05)
    told: list[tuple[int | None, int | None]] = []
    async with a_rig(monkeypatch) as rig:
        await rig.desire(WorkState.RUNNING, an_assignment())
        await rig.until(lambda: bool(rig.workers))
        rig.workers[0].say(a_status())
        await asyncio.sleep(0)

        def note() -> None:
            observed = rig.supervisor.observe()
            told.append((observed.step, observed.policy_version))

        rig.supervisor.notify = note
        for step, version in ((3, 3), (4, 3), (4, 4)):
            rig.workers[0].say(a_status(step=step, version=version))
        assert told == []
        await rig.until(lambda: bool(told))
        rig.workers[0].say(a_status(WorkState.FINISHED, step=5, version=5))
        assert told == [(4, 4), (5, 5)]


async def test_a_worker_that_has_read_no_checkpoint_yet_names_no_step() -> None:
    answers = io.BytesIO()

    WorkerProcess(asyncio.StreamReader(), answers)._say_status()

    assert json.loads(answers.getvalue())["step"] is None, "a run that goes on is not at step 0"


async def test_pause_and_resume_reach_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_rig(monkeypatch) as rig:
        for state in (WorkState.RUNNING, WorkState.PAUSED, WorkState.RUNNING):
            await rig.desire(state, an_assignment())

        assert rig.workers[0].orders == [WorkState.RUNNING, WorkState.PAUSED, WorkState.RUNNING]


@pytest.mark.parametrize("state", [WorkState.IDLE, WorkState.DRAINING])
async def test_an_end_ends_the_worker_and_falls_idle(monkeypatch: pytest.MonkeyPatch, state: WorkState) -> None:
    async with a_rig(monkeypatch) as rig:
        await rig.desire(WorkState.RUNNING, an_assignment())
        await rig.desire(state, None if state is WorkState.IDLE else an_assignment())

        assert rig.workers[0].orders[-1] is state, "idle: nobody goes on, so there is to be a last checkpoint"
        assert rig.state is WorkState.IDLE
        assert rig.supervisor.observe().experiment_id is None


async def test_a_death_is_reported_and_another_worker_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_rig(monkeypatch) as rig:
        await rig.desire(WorkState.RUNNING, an_assignment())
        rig.workers[0].end(-9, "killed because memory ran out")
        await rig.until(lambda: len(rig.workers) == 2)

        failure = rig.supervisor.observe().failure

        assert failure == Failure(component="trainer", cause="killed because memory ran out", fatal=False)
        assert rig.workers[1].launch.incarnation == 2_000_002
        rig.workers[1].say(a_status())
        assert rig.supervisor.observe().failure is None


async def test_dying_again_and_again_is_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_rig(monkeypatch) as rig:
        await rig.desire(WorkState.RUNNING, an_assignment())
        for number in range(1, MAX_DEATHS + 1):
            await rig.until(lambda number=number: len(rig.workers) == number)
            rig.workers[-1].end(1, "it hurts")
        await rig.until(lambda: rig.state is WorkState.FAILED)

        failure = rig.supervisor.observe().failure
        assert failure is not None
        assert failure.fatal
        assert failure.cause.endswith("the last time: it hurts")
        assert len(rig.workers) == MAX_DEATHS


async def test_a_reason_that_passes_is_no_death_however_often_it_ends_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flotilla.shared.service.reconciling.FIRST_PAUSE_SECONDS", 0.0)
    failure = Failure(component="trainer", cause="no Redis server answers", fatal=False)
    async with a_rig(monkeypatch) as rig:
        await rig.desire(WorkState.RUNNING, an_assignment())
        for number in range(1, 3 * MAX_DEATHS):
            await rig.until(lambda number=number: len(rig.workers) == number)
            rig.workers[-1].say(Failed(failure=failure, is_permanent=False, is_passing=True))
            rig.workers[-1].end(1)
            await rig.until(lambda number=number: len(rig.workers) == number + 1)
            assert rig.supervisor.observe().failure == failure

        rig.workers[-1].say(a_status())

        assert rig.state is WorkState.RUNNING
        assert rig.supervisor.observe().failure is None


async def test_the_pauses_grow_while_a_reason_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flotilla.shared.service.reconciling.FIRST_PAUSE_SECONDS", 0.001)
    failure = Failure(component="trainer", cause="no Redis server answers", fatal=False)
    pauses: list[float] = []
    postpone = StartBackoff.postpone

    def noted(backoff: StartBackoff, pause_seconds: float | None = None) -> float:
        pauses.append(postpone(backoff, pause_seconds))
        return pauses[-1]

    monkeypatch.setattr(StartBackoff, "postpone", noted)
    async with a_rig(monkeypatch) as rig:
        await rig.desire(WorkState.RUNNING, an_assignment())
        for number in range(1, 5):
            await rig.until(lambda number=number: len(rig.workers) == number)
            if number == 4:
                rig.workers[-1].say(a_status())
            rig.workers[-1].say(Failed(failure=failure, is_permanent=False, is_passing=True))
            rig.workers[-1].end(1)
        await rig.until(lambda: len(rig.workers) == 5)

    assert pauses == [0.001, 0.002, 0.004, 0.001], "the fourth had worked in between"


async def test_a_worker_that_dies_without_a_word_is_not_given_the_cause_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failure = Failure(component="trainer", cause="no Redis server answers", fatal=False)
    monkeypatch.setattr("flotilla.shared.service.reconciling.FIRST_PAUSE_SECONDS", 0.001)
    async with a_rig(monkeypatch) as rig:
        await rig.desire(WorkState.RUNNING, an_assignment())
        rig.workers[-1].say(Failed(failure=failure, is_permanent=False, is_passing=True))
        rig.workers[-1].end(1)
        await rig.until(lambda: len(rig.workers) == 2)
        assert rig.supervisor.observe().failure == failure, "it is not known to have passed"

        rig.workers[-1].end(-9, "killed because memory ran out")
        await rig.until(lambda: len(rig.workers) == 3)

        told = rig.supervisor.observe().failure
        assert told is not None
        assert told.cause == "killed because memory ran out"


async def test_a_death_with_others_in_the_process_counts_against_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flotilla.shared.service.reconciling.FIRST_PAUSE_SECONDS", 0.001)
    async with a_rig(monkeypatch) as rig:
        await rig.desire(WorkState.RUNNING, an_assignment())
        for number in range(1, MAX_DEATHS):
            rig.workers[-1].end(-9, "killed")
            await rig.until(lambda number=number: len(rig.workers) == number + 1)  # type: ignore[misc]
        rig.workers[-1].end(-9, "killed with others", is_with_others=True)
        await rig.until(lambda: len(rig.workers) == MAX_DEATHS + 1)
        failure = rig.supervisor.observe().failure
        assert failure is not None and not failure.fatal
        assert failure.cause == "killed with others"

        rig.workers[-1].end(-9, "killed")
        await rig.until(lambda: rig.state is WorkState.FAILED)


@pytest.mark.parametrize("error", [Unavailable("no Redis server answers"), DeadlineExceeded("too slow")])
def test_what_a_server_did_not_answer_in_time_is_a_reason_that_passes(error: FlotillaError) -> None:
    told = describe_failure(error)

    assert (told.is_permanent, told.is_passing, told.failure.fatal) == (False, True, False)


def test_a_defect_of_the_training_is_none() -> None:
    assert not describe_failure(RuntimeError("shapes differ")).is_passing
    assert not describe_failure(ModelError("no config.json")).is_passing


async def test_a_hopeless_failure_is_fatal_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_rig(monkeypatch) as rig:
        await rig.desire(WorkState.RUNNING, an_assignment())
        failure = Failure(component="trainer", cause="model directory /nowhere does not exist")
        rig.workers[0].say(Failed(failure=failure, is_permanent=True))
        rig.workers[0].end(1)
        await rig.until(lambda: rig.state is WorkState.FAILED)
        await rig.desire(WorkState.RUNNING, an_assignment())

        assert rig.supervisor.observe().failure == failure
        assert len(rig.workers) == 1


async def test_a_new_revision_gets_a_new_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_rig(monkeypatch) as rig:
        await rig.desire(WorkState.RUNNING, an_assignment())
        await rig.desire(WorkState.RUNNING, an_assignment(revision=2))
        await rig.until(lambda: len(rig.workers) == 2)

        assert rig.workers[0].orders[-1] is WorkState.DRAINING
        assert rig.workers[1].launch.assignment.revision == 2


async def test_a_service_that_got_another_id_gets_another_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A database that came back older may appoint it again under a number that it had already."""
    async with a_rig(monkeypatch) as rig:
        await rig.desire(WorkState.RUNNING, an_assignment())
        rig.service_id = "trainer-2"
        await rig.desire(WorkState.RUNNING, an_assignment())
        await rig.until(lambda: len(rig.workers) == 2)

        assert rig.workers[0].orders[-1] is WorkState.DRAINING
        assert [worker.launch.service_id for worker in rig.workers] == ["trainer-1", "trainer-2"]


async def test_a_spec_that_does_not_validate_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_rig(monkeypatch) as rig:
        await rig.desire(WorkState.RUNNING, an_assignment(spec={"name": "x"}))
        await rig.until(lambda: rig.state is WorkState.FAILED)

        failure = rig.supervisor.observe().failure
        assert failure is not None
        assert "optimisation" in failure.cause
        assert rig.workers == []


def test_no_secret_is_inherited_by_the_worker() -> None:
    found = environment_of({"FLOTILLA_TOKEN": "secret", "PATH": str(Path("/bin"))}, threads=3)

    assert "secret" not in found.values()
    assert (found["OMP_NUM_THREADS"], found["OMP_WAIT_POLICY"], found["PATH"]) == ("3", "PASSIVE", "/bin")


def test_a_worker_that_shares_cores_may_use_all_of_them() -> None:
    cores = str(len(os.sched_getaffinity(0)))

    assert environment_of({}, threads="auto")["OMP_NUM_THREADS"] == cores


async def follow(rig: Rig, shift: int, *, may_hold: bool) -> None:
    order = DeviceOrder(shift=shift, may_hold=may_hold)
    desired = DesiredState(tag=str(shift), state=WorkState.RUNNING, assignment=an_assignment(), device=order)
    await rig.supervisor.apply(desired)
    await asyncio.sleep(0.01)


def has(shift: int, *, held: bool, wanted: bool) -> DeviceReport:
    return DeviceReport(shift=shift, is_held=held, is_wanted=wanted)


async def test_a_worker_starts_when_the_device_is_free_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_rig(monkeypatch) as rig:
        await follow(rig, 2, may_hold=False)
        assert (rig.workers, rig.supervisor.observe().device) == ([], has(2, held=False, wanted=True))

        await follow(rig, 3, may_hold=True)
        await rig.until(lambda: bool(rig.workers))

        # It loads, and says nothing of the device yet.
        assert rig.supervisor.observe().device == has(3, held=True, wanted=True)


async def test_a_worker_that_dies_in_the_shift_of_others_waits_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_rig(monkeypatch) as rig:
        await follow(rig, 1, may_hold=True)
        await rig.until(lambda: bool(rig.workers))
        await follow(rig, 2, may_hold=False)
        released = has(2, held=False, wanted=False)
        rig.workers[0].say(Status(state=WorkState.RUNNING, step=3, version=3, device=released))
        assert rig.supervisor.observe().device == released

        rig.workers[0].end(-9)
        await rig.until(lambda: rig.supervisor.observe().device == has(2, held=False, wanted=True))
        await asyncio.sleep(0.02)
        assert len(rig.workers) == 1

        await follow(rig, 3, may_hold=True)
        await rig.until(lambda: len(rig.workers) == 2)
        # What the dead one said last is not true of its successor.
        assert rig.supervisor.observe().device == has(3, held=True, wanted=True)


async def test_a_worker_that_keeps_a_device_that_it_does_not_need_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flotilla.services.trainer.supervisor.supervisor.RELEASE_SECONDS", 0.01)
    async with a_rig(monkeypatch) as rig:
        await follow(rig, 1, may_hold=True)
        await rig.until(lambda: bool(rig.workers))
        await follow(rig, 2, may_hold=False)
        needs, keeps = (has(2, held=True, wanted=wanted) for wanted in (True, False))

        async def say_for_longer_than_it_may_keep_it(report: DeviceReport) -> None:
            for _ in range(2):
                rig.workers[0].say(Status(state=WorkState.RUNNING, step=3, version=3, device=report))
                await asyncio.sleep(0.02)

        await say_for_longer_than_it_may_keep_it(needs)
        assert not rig.workers[0].has_ended, "its work goes on"
        await say_for_longer_than_it_may_keep_it(keeps)

        await rig.until(lambda: rig.workers[0].has_ended)
        await rig.until(lambda: rig.supervisor.observe().device == has(2, held=False, wanted=True))
        assert len(rig.workers) == 1, "the next one waits for its turn"


async def test_a_host_that_does_not_lead_says_what_its_ranks_have(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(held: bool | None, state: WorkState = WorkState.RUNNING) -> Status:
        return Status(state=state, step=None, version=None, holds_devices=held)

    async with a_rig(monkeypatch) as rig:
        await follow(rig, 1, may_hold=True)
        await rig.until(lambda: bool(rig.workers))
        rig.workers[0].say(told(held=True, state=WorkState.STARTING))
        assert rig.supervisor.observe().device == has(1, held=True, wanted=True)
        rig.workers[0].say(told(held=True))
        assert rig.supervisor.observe().device == has(1, held=True, wanted=False)

        await follow(rig, 2, may_hold=False)
        assert rig.supervisor.observe().device == has(2, held=True, wanted=False)
        rig.workers[0].say(told(held=False))
        assert rig.supervisor.observe().device == has(2, held=False, wanted=False)

        await follow(rig, 3, may_hold=True)
        # The leader may let it load at any moment now.
        assert rig.supervisor.observe().device == has(3, held=True, wanted=False)

        rig.workers[0].end(-9)
        await rig.until(lambda: len(rig.workers) == 2)
        assert rig.supervisor.observe().device == has(3, held=True, wanted=True)


async def test_a_host_that_does_not_lead_is_not_ended_while_the_leader_needs_its_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flotilla.services.trainer.supervisor.supervisor.RELEASE_SECONDS", 0.01)
    async with a_rig(monkeypatch) as rig:
        await follow(rig, 1, may_hold=True)
        await rig.until(lambda: bool(rig.workers))
        await follow(rig, 2, may_hold=False)
        for _ in range(2):
            rig.workers[0].say(Status(state=WorkState.RUNNING, step=3, version=None, holds_devices=True))
            await asyncio.sleep(0.02)

        assert not rig.workers[0].has_ended
