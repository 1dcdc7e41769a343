from itertools import accumulate, islice, pairwise
from random import Random
from statistics import fmean

import pytest

from flotilla.services.gateway.datasets.dataset import Dataset
from flotilla.services.gateway.feeder.status import FullStream
from flotilla.services.gateway.monitoring.watchdog import POLL_SECONDS, Stall, Watchdog, pauses
from flotilla.services.gateway.state import GatewayState
from flotilla.shared.clock import ManualClock
from flotilla.shared.schemas.service import GRADER, JUDGE, SANDBOX, TEACHER, Failure, ServiceKind
from flotilla.shared.streams.hop import HopName
from tests.unit.gateway.builders import a_gateway, add_experiment, add_service


def a_watchdog(gateway: GatewayState, clock: ManualClock) -> Watchdog:
    experiment = gateway.repository.get("tiny-1")
    return Watchdog(
        experiment,
        Stall(experiment, gateway.repository, gateway.events),
        gateway.registry,
        gateway.publications,
        clock,
        measured=gateway.measurements.of(experiment),
        why_blocked=gateway.feeder_status.of(experiment).why_blocked,
        stall_seconds=30.0,
    )


async def test_a_stall_is_named_on_the_experiment_and_forgotten_when_progress_resumes() -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock)
    experiment = await add_experiment(gateway)
    for kind in (ServiceKind.TRAINER, ServiceKind.ROLLOUT, ServiceKind.REWARD):
        await add_service(gateway, kind, kind.value, experiment.id)
    dataset = Dataset([{"prompt": "p", "label": "1"}], experiment.spec.data, 0)
    await experiment.train.admission.issue(dataset.task(0, group_size=2), limit=9)
    watchdog = a_watchdog(gateway, clock)

    await watchdog.look()
    clock.advance(29.0)
    await watchdog.look()
    assert gateway.commands.view(experiment).problem is None

    clock.advance(2.0)
    await watchdog.look()
    problem = gateway.commands.view(experiment).problem
    assert problem is not None
    assert (problem.component, problem.cause) == ("rollout", "1 tasks wait and none is claimed")

    await experiment.train.admission.issue(dataset.task(1, group_size=2), limit=9)
    await watchdog.look()
    assert gateway.commands.view(experiment).problem is None
    events = [event.type for event in await gateway.store.events(experiment.id, after=0, limit=99)]
    assert events.count("stalled") == events.count("progress_resumed") == 1


@pytest.mark.parametrize("component", [TEACHER, GRADER, JUDGE, SANDBOX])
async def test_a_server_that_does_not_answer_is_named_without_waiting_for_a_stall(component: str) -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock)
    experiment = await add_experiment(gateway)
    for kind in (ServiceKind.TRAINER, ServiceKind.ROLLOUT, ServiceKind.REWARD):
        await add_service(gateway, kind, kind.value, experiment.id)
    (reward,) = gateway.registry.of(experiment.id, ServiceKind.REWARD)
    failure = Failure(component=component, cause="http://t does not answer", fatal=False)
    reward.observed = reward.observed.model_copy(update={"failure": failure})
    watchdog = a_watchdog(gateway, clock)

    await watchdog.look()

    problem = gateway.commands.view(experiment).problem
    assert problem is not None
    assert (problem.component, problem.cause) == (component, failure.cause)

    reward.observed = reward.observed.model_copy(update={"failure": None})
    await watchdog.look()
    assert gateway.commands.view(experiment).problem is None


async def test_a_stall_that_was_named_lasts_over_a_restart_until_there_is_progress() -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock)
    problem = {"component": "reward", "cause": "1 generated groups wait and none is claimed", "at": "then"}
    experiment = await add_experiment(gateway, problem=problem)
    for kind in (ServiceKind.TRAINER, ServiceKind.ROLLOUT, ServiceKind.REWARD):
        await add_service(gateway, kind, kind.value, experiment.id)
    dataset = Dataset([{"prompt": "p", "label": "1"}], experiment.spec.data, 0)
    await experiment.train.admission.issue(dataset.task(0, group_size=2), limit=9)
    watchdog = a_watchdog(gateway, clock)

    await watchdog.look()
    clock.advance(1.0)
    await watchdog.look()
    stalled = gateway.commands.view(experiment).problem
    assert stalled is not None and stalled.component == "rollout"

    await experiment.train.admission.issue(dataset.task(1, group_size=2), limit=9)
    await watchdog.look()
    assert gateway.commands.view(experiment).problem is None


async def test_what_stood_still_before_a_restart_is_named_soon_after_it() -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock)
    experiment = await add_experiment(gateway, updated_at=clock.now() - 25.0)
    watchdog = a_watchdog(gateway, clock)

    await watchdog.look()
    clock.advance(9.0)
    await watchdog.look()
    assert gateway.commands.view(experiment).problem is None
    clock.advance(2.0)
    await watchdog.look()

    assert gateway.commands.view(experiment).problem is not None


async def test_a_full_stream_is_named_at_once() -> None:
    gateway = a_gateway()
    experiment = await add_experiment(gateway)
    gateway.feeder_status.of(experiment).full_stream = FullStream(HopName.SCORED, 2 * 1024**2)
    watchdog = a_watchdog(gateway, ManualClock())

    await watchdog.look()
    problem = gateway.commands.view(experiment).problem
    assert problem is not None
    assert problem.component == "streams"
    assert problem.cause.startswith("stream scored has reached resources.stream_bytes (2 MiB)")
    assert "raise the bound if those of one step do not fit" in problem.cause

    gateway.feeder_status.of(experiment).full_stream = None
    await watchdog.look()
    assert gateway.commands.view(experiment).problem is None


async def test_a_data_plane_that_refuses_is_named_at_once_and_stalls_nobody_else() -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock)
    experiment = await add_experiment(gateway)
    watchdog = a_watchdog(gateway, clock)
    status = gateway.feeder_status.of(experiment)
    status.refusal = "the Redis server cannot write its log: its disk is full, or fails"

    for _ in range(3):
        await watchdog.look()
        problem = gateway.commands.view(experiment).problem
        assert problem is not None
        assert (problem.component, problem.cause) == ("redis", status.refusal)
        clock.advance(20.0)

    status.refusal = None
    await watchdog.look()
    assert gateway.commands.view(experiment).problem is None


async def test_what_the_scheduler_waits_for_is_not_overwritten() -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock)
    experiment = await add_experiment(gateway)
    await gateway.repository.set_problem(experiment, "scheduler", "waiting for 1 trainer to register")
    watchdog = a_watchdog(gateway, clock)

    await watchdog.look()
    clock.advance(60.0)
    await watchdog.look()

    problem = gateway.commands.view(experiment).problem
    assert problem is not None and problem.component == "scheduler"


@pytest.mark.parametrize("step_seconds", [POLL_SECONDS / 4, POLL_SECONDS / 2, POLL_SECONDS, 2 * POLL_SECONDS])
def test_looks_see_each_phase_of_a_step_for_its_share_of_the_time(step_seconds: float) -> None:
    """Looks that were a whole number of steps apart would see one phase and no other."""
    looks = [0.0, *accumulate(islice(pauses(Random(1)), 400))]

    phases = [at / step_seconds % 1 for at in looks]

    for begin in (0.0, 0.25, 0.5, 0.75):
        assert fmean(begin <= phase < begin + 0.25 for phase in phases) == pytest.approx(0.25, abs=0.06)
    assert looks[-1] / 400 == pytest.approx(POLL_SECONDS, rel=0.05)
    assert all(POLL_SECONDS / 2 <= after - before <= 1.5 * POLL_SECONDS for before, after in pairwise(looks))


async def test_totals_that_fall_with_a_loss_of_redis_are_told_once() -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock)
    experiment = await add_experiment(gateway)
    dataset = Dataset([{"prompt": "p", "label": "1"}], experiment.spec.data, 0)
    for number in range(3):
        await experiment.train.admission.issue(dataset.task(number, group_size=2), limit=9)
    watchdog = a_watchdog(gateway, clock)
    await watchdog.look()

    await experiment.train.remove()
    await experiment.train.admission.issue(dataset.task(0, group_size=2), limit=9)
    await watchdog.look()
    await watchdog.look()

    told = [e for e in await gateway.store.events(experiment.id, after=0, limit=99) if e.type == "redis_went_back"]
    assert [event.data for event in told] == [{"issued_before": 3, "issued": 1}]
