"""Leases, long polls and what services' words set in motion, with a clock that is moved by hand."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from flotilla.services.gateway.publications.transports import can_receive
from flotilla.services.gateway.routes.facts import diagnosis
from flotilla.services.gateway.runtime import reconciler
from flotilla.services.gateway.state import GatewayState
from flotilla.services.gateway.store.memory import MemoryStore
from flotilla.services.gateway.store.writes import PutCheckpoint, PutRecord
from flotilla.shared.clock import ManualClock
from flotilla.shared.errors import Conflict, NotFound, Unavailable
from flotilla.shared.schemas.experiment import CheckpointView, ExperimentState
from flotilla.shared.schemas.service import (
    DRAIN_NOTICE_SECONDS,
    DesiredState,
    DeviceReport,
    Failure,
    ObservedState,
    ServedWeights,
    ServiceKind,
    WorkState,
)
from tests.unit.gateway.builders import (
    a_gateway,
    a_registration,
    a_spec,
    add_experiment,
    add_service,
    running,
    say,
    stays,
    stop,
    turns,
    until,
)


def poll(
    gateway: GatewayState, service_id: str, tag: str, watch: Callable[[], asyncio.Future[Any]] = stays
) -> "asyncio.Task[DesiredState]":
    observed = ObservedState(acknowledged=tag)
    return asyncio.create_task(gateway.fleet.report(service_id, observed, 30.0, watch))


async def test_the_same_process_gets_the_same_id_again() -> None:
    gateway = a_gateway()

    first = await gateway.fleet.register(a_registration(incarnation="one"))
    again = await gateway.fleet.register(a_registration(incarnation="one", address="http://elsewhere"))
    other = await gateway.fleet.register(a_registration(incarnation="two"))

    assert first.service_id == again.service_id != other.service_id
    assert gateway.registry.get(first.service_id).record.address == "http://elsewhere"


async def test_an_incarnation_of_another_kind_gives_nobody_that_services_pass() -> None:
    gateway = a_gateway()
    trainer = await gateway.fleet.register(a_registration(ServiceKind.TRAINER, "one"))

    with pytest.raises(Conflict, match="another kind has this incarnation"):
        await gateway.fleet.register(a_registration(ServiceKind.ROLLOUT, "one"))

    assert [(service.id, service.kind) for service in gateway.registry] == [(trainer.service_id, ServiceKind.TRAINER)]


@pytest.mark.parametrize(
    "address",
    [
        "file:///etc/passwd",
        "ftp://host/",
        "http://",
        "host:80",
        "",
        "http://user:password@host",
        "http://host?x=1",
        "http://host#x",
        "http://host:99999",
        "http://host:0",
        "http://a host",
        "http://host/\n",
        "http://[::1",
        f"http://{'h' * 100_000}",
    ],
    ids=range(14),
)
def test_an_address_is_a_url_of_http_and_short(address: str) -> None:
    with pytest.raises(ValidationError, match="address"):
        a_registration(address=address)


@pytest.mark.parametrize("address", ["http://127.0.0.1:9002", "https://gpu-7.local/rollout", "http://[::1]:80/"])
def test_an_address_may_be_of_any_host_and_have_a_path(address: str) -> None:
    assert a_registration(address=address).address == address


@pytest.mark.parametrize("where", ["between two rounds", "inside a round"])
async def test_a_gateway_that_stood_still_gives_up_nobody_for_it(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock, lease_seconds=10.0)
    await add_service(gateway, ServiceKind.REWARD, "one")
    begun = clock.monotonic()
    (service,) = gateway.registry
    rounds, standstills = 0, [60.0]

    async def a_round() -> None:
        nonlocal rounds
        rounds += 1
        if rounds > 2 and where == "inside a round" and standstills:
            clock.advance(standstills.pop())

    monkeypatch.setattr(reconciler, "PERIOD_SECONDS", 0.01)
    monkeypatch.setattr(gateway.scheduler, "reconcile", a_round)
    async with running(gateway.reconciler.run()):
        await until(lambda: rounds > 2)
        if where == "between two rounds":
            clock.advance(standstills.pop())
        await until(lambda: not standstills)
        seen = rounds
        await until(lambda: rounds > seen + 1)

        assert len(gateway.registry) == 1
        assert service.lease_ends > begun + 60
        assert 9.0 < service.lease_ends - clock.monotonic() <= 10.0

    clock.advance(10.0)
    await gateway.reconciler.reconcile()
    assert len(gateway.registry) == 0
    await stop(gateway)


async def test_a_service_that_is_silent_is_forgotten_and_told_to_register_again() -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock, lease_seconds=10.0)
    service_id = await add_service(gateway, ServiceKind.REWARD, "one")

    clock.advance(9.9)
    await gateway.reconciler.reconcile()
    await say(gateway, service_id, ObservedState())
    clock.advance(9.9)
    await gateway.reconciler.reconcile()
    assert len(gateway.registry) == 1

    clock.advance(0.2)
    await gateway.reconciler.reconcile()
    with pytest.raises(NotFound, match="registers again"):
        await say(gateway, service_id, ObservedState())


async def test_a_poll_answers_at_once_when_the_desired_state_is_not_the_acknowledged_one() -> None:
    gateway = a_gateway()
    service_id = await add_service(gateway, ServiceKind.REWARD, "one")

    answer = await gateway.fleet.report(service_id, ObservedState(acknowledged="old"), 30.0, stays)

    assert answer.state is WorkState.IDLE


@pytest.mark.parametrize(("kind", "seconds"), [(ServiceKind.REWARD, 10.0), (ServiceKind.ROLLOUT, 5.0)])
async def test_a_poll_waits_for_a_change_and_keeps_the_lease_while_it_waits(kind: ServiceKind, seconds: float) -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock, lease_seconds=10.0, rest_seconds=5.0)
    experiment = await add_experiment(gateway)
    service_id = await add_service(gateway, kind, "one")
    tag = (await say(gateway, service_id, ObservedState())).tag
    waiting = poll(gateway, service_id, tag)
    await turns()

    clock.advance(25.0)
    assert gateway.registry.expired() == []
    assert not waiting.done()
    await gateway.registry.assign(gateway.registry.get(service_id), experiment.id)

    answer = await asyncio.wait_for(waiting, 30.0)
    assert answer.assignment is not None and answer.assignment.experiment_id == experiment.id
    service = gateway.registry.get(service_id)
    assert service.lease_ends == clock.monotonic() + seconds
    assert service.heard_at == clock.monotonic() - 25.0, "whether the answer arrives is not known"


async def test_a_broken_connection_leaves_a_short_rest_of_the_lease() -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock, rest_seconds=5.0)
    service_id = await add_service(gateway, ServiceKind.ROLLOUT, "one")
    tag = (await say(gateway, service_id, ObservedState())).tag
    hung_up = stays()
    waiting = poll(gateway, service_id, tag, lambda: hung_up)
    await turns()

    hung_up.set_result(None)
    await asyncio.wait_for(waiting, 30.0)

    clock.advance(5.0)
    assert [service.id for service in gateway.registry.expired()] == [service_id]


async def test_a_newer_poll_ends_the_older_one_and_a_push_does_not() -> None:
    gateway = a_gateway()
    service_id = await add_service(gateway, ServiceKind.ROLLOUT, "one")
    tag = (await say(gateway, service_id, ObservedState())).tag
    older = poll(gateway, service_id, tag)
    await turns()
    await say(gateway, service_id, ObservedState(acknowledged=tag))
    assert not older.done()

    newer = poll(gateway, service_id, tag)
    await turns()
    gateway.registry.get(service_id).changed.fire()

    assert (await asyncio.wait_for(older, 30.0)).tag == tag
    assert not newer.done()
    newer.cancel()


async def test_what_a_push_was_answered_the_waiting_poll_is_not_and_the_next_change_it_is() -> None:
    gateway = a_gateway()
    experiment = await add_experiment(gateway)
    service_id = await add_service(gateway, ServiceKind.ROLLOUT, "one")
    service = gateway.registry.get(service_id)
    idle = (await say(gateway, service_id, ObservedState())).tag
    waiting = poll(gateway, service_id, idle)
    await turns()

    # As a report that commits a version does: what it changes is stored while it is handled.
    async def changes(*_: Any) -> None:
        await gateway.registry.assign(service, experiment.id)
        await turns()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gateway.fleet, "_observe", changes)
        assigned = (await say(gateway, service_id, ObservedState(acknowledged=idle))).tag
    await turns()
    assert assigned != idle
    assert not waiting.done()

    # Back to what the poll has acknowledged, and the service no longer has.
    await gateway.registry.assign(service, None)

    assert (await asyncio.wait_for(waiting, 30.0)).tag == idle


async def test_a_poll_is_answered_after_a_push_that_failed() -> None:
    gateway = a_gateway()
    experiment = await add_experiment(gateway)
    service_id = await add_service(gateway, ServiceKind.ROLLOUT, "one")
    idle = (await say(gateway, service_id, ObservedState())).tag
    waiting = poll(gateway, service_id, idle)
    await turns()

    async def fails(*_: Any) -> None:
        await gateway.registry.assign(gateway.registry.get(service_id), experiment.id)
        await turns()
        assert not waiting.done()
        raise Unavailable("the database is away")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gateway.fleet, "_observe", fails)
        with pytest.raises(Unavailable):
            await say(gateway, service_id, ObservedState(acknowledged=idle))

    assert (await asyncio.wait_for(waiting, 30.0)).tag != idle


async def test_a_new_poll_is_told_again_what_a_push_was_answered() -> None:
    gateway = a_gateway()
    experiment = await add_experiment(gateway)
    service_id = await add_service(gateway, ServiceKind.ROLLOUT, "one")
    idle = (await say(gateway, service_id, ObservedState())).tag
    await gateway.registry.assign(gateway.registry.get(service_id), experiment.id)
    told = (await say(gateway, service_id, ObservedState(acknowledged=idle))).tag

    # The answer was lost, or overtaken: the service still has what it had.
    assert (await asyncio.wait_for(poll(gateway, service_id, idle), 30.0)).tag == told


async def test_a_service_that_is_removed_while_it_waits_hears_of_it() -> None:
    gateway = a_gateway()
    service_id = await add_service(gateway, ServiceKind.ROLLOUT, "one")
    tag = (await say(gateway, service_id, ObservedState())).tag
    waiting = poll(gateway, service_id, tag)
    await turns()

    await gateway.fleet.leave(service_id, reason="it left")

    with pytest.raises(NotFound):
        await asyncio.wait_for(waiting, 30.0)


async def test_a_started_experiment_is_placed_becomes_ready_and_runs() -> None:
    gateway = a_gateway()
    experiment = await add_experiment(gateway, state=ExperimentState.STARTING)
    ids = {kind: await add_service(gateway, kind, kind.value) for kind in ServiceKind}
    await gateway.reconciler.reconcile()
    for kind, service_id in ids.items():
        version = -1 if kind is ServiceKind.ROLLOUT else None
        await say(
            gateway,
            service_id,
            ObservedState(experiment_id=experiment.id, state=WorkState.RUNNING, policy_version=version),
        )
    await gateway.reconciler.reconcile()
    assert experiment.state is ExperimentState.STARTING

    loaded = ObservedState(experiment_id=experiment.id, state=WorkState.RUNNING, policy_version=0)
    answer = await say(gateway, ids[ServiceKind.ROLLOUT], loaded)
    await gateway.reconciler.reconcile()

    assert experiment.state is ExperimentState.RUNNING
    assert answer.assignment is not None and answer.assignment.spec == experiment.record.spec
    assert gateway.registry.get(ids[ServiceKind.SANDBOX]).experiment_id is None
    assert experiment.record.trainer_epoch == 1
    await stop(gateway)


async def test_what_an_experiment_waits_for_is_said_and_forgotten_when_it_comes() -> None:
    gateway = a_gateway()
    experiment = await add_experiment(gateway, state=ExperimentState.STARTING)
    await add_service(gateway, ServiceKind.ROLLOUT, "r")
    await add_service(gateway, ServiceKind.REWARD, "w")

    await gateway.reconciler.reconcile()

    problem = gateway.commands.view(experiment).problem
    assert problem is not None
    assert (problem.component, problem.cause) == ("scheduler", "waiting for 1 trainer to register")
    await add_service(gateway, ServiceKind.TRAINER, "t")
    await gateway.reconciler.reconcile()
    assert gateway.commands.view(experiment).problem is None
    await stop(gateway)


async def test_a_lost_trainers_replacement_gets_the_next_epoch() -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock)
    experiment = await add_experiment(gateway, state=ExperimentState.STARTING)
    ids = [await add_service(gateway, kind, kind.value) for kind in ServiceKind]
    await gateway.reconciler.reconcile()
    first = gateway.registry.trainer_of(experiment.id)
    assert first is not None
    spare = await add_service(gateway, ServiceKind.TRAINER, "spare")

    await gateway.fleet.leave(first.id, reason="it died")
    await gateway.reconciler.reconcile()

    second = gateway.registry.trainer_of(experiment.id)
    assert second is not None and second.id == spare
    desired = gateway.fleet.desired(second)
    assert desired.assignment is not None and desired.assignment.trainer_epoch == 2
    assert len(ids) == 4
    await stop(gateway)


async def test_a_draining_trainer_keeps_its_place_until_it_is_idle() -> None:
    gateway = a_gateway()
    experiment = await add_experiment(gateway, trainer_epoch=1)
    trainer = await add_service(gateway, ServiceKind.TRAINER, "t", experiment.id)
    spare = await add_service(gateway, ServiceKind.TRAINER, "spare")

    await gateway.fleet.drain(trainer)
    await gateway.reconciler.reconcile()
    assert gateway.registry.get(spare).experiment_id is None

    await say(gateway, trainer, ObservedState(state=WorkState.IDLE))
    await gateway.reconciler.reconcile()
    await gateway.reconciler.reconcile()
    assert gateway.registry.get(spare).experiment_id == experiment.id
    assert gateway.registry.get(trainer).experiment_id is None
    await stop(gateway)


async def a_working_rollout(gateway: GatewayState, experiment_id: str) -> tuple[str, ObservedState]:
    service_id = await add_service(gateway, ServiceKind.ROLLOUT, "r", experiment_id)
    return service_id, ObservedState(experiment_id=experiment_id, state=WorkState.RUNNING, policy_version=0)


async def test_a_drained_service_is_told_what_is_left_of_its_notice() -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock)
    experiment = await add_experiment(gateway)
    rollout, observed = await a_working_rollout(gateway, experiment.id)
    waiting = poll(gateway, rollout, (await say(gateway, rollout, observed)).tag)
    await turns()

    await gateway.fleet.drain(rollout, 20.0)

    first = await asyncio.wait_for(waiting, 30.0)
    assert (first.state, first.notice_seconds) == (WorkState.DRAINING, 20.0)
    clock.advance(5.0)
    later = await say(gateway, rollout, observed)
    assert (later.tag, later.notice_seconds) == (first.tag, 15.0), "time that passes changes nothing"
    await gateway.fleet.drain(rollout, 2.0)
    shorter = await say(gateway, rollout, observed)
    assert shorter.tag != first.tag
    assert shorter.notice_seconds == 2.0
    assert gateway.registry.view(gateway.registry.get(rollout)).notice_ends_in_seconds == 2.0


async def test_a_service_that_is_asked_to_leave_its_experiment_learns_its_notice_and_what_it_handed_over_is_told() -> (
    None
):
    gateway = a_gateway()
    experiment = await add_experiment(gateway)
    rollout, observed = await a_working_rollout(gateway, experiment.id)
    service = gateway.registry.get(rollout)

    await gateway.fleet.ask_to_leave(service, "somebody else's turn", 5.0)

    desired = await say(gateway, rollout, observed)
    assert (desired.state, desired.notice_seconds) == (WorkState.DRAINING, 5.0)
    assert desired.assignment is not None
    assert desired.assignment.experiment_id == experiment.id
    finished = observed.model_copy(update={"state": WorkState.FINISHED, "load": {"tokens_handed_over": 7.0}})
    assert (await say(gateway, rollout, finished)).state is WorkState.DRAINING
    await gateway.fleet.release(service, "somebody else's turn")
    desired = await say(gateway, rollout, finished)
    assert (desired.state, desired.assignment) == (WorkState.IDLE, None), "not drained for good"
    left = [e for e in await gateway.store.events(experiment.id, after=0, limit=100) if e.type == "service_left"]
    assert [(e.data["reason"], e.data["tokens_handed_over"]) for e in left] == [("somebody else's turn", 7.0)]


async def test_a_diagnosis_names_who_does_not_work_now() -> None:
    gateway = a_gateway()
    experiment = await add_experiment(gateway)
    rollout, observed = await a_working_rollout(gateway, experiment.id)
    await say(gateway, rollout, observed)
    assert (await diagnosis(experiment.id, gateway)).failing == ()

    died = Failure(component="rollout engine", cause="the server ended by signal SIGKILL", fatal=False)
    await say(gateway, rollout, observed.model_copy(update={"state": WorkState.STARTING, "failure": died}))

    (failing,) = (await diagnosis(experiment.id, gateway)).failing
    assert (failing.service_id, failing.component, failing.cause) == (rollout, died.component, died.cause)


async def test_a_drained_service_that_works_on_long_after_its_notice_loses_its_assignment() -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock, lease_seconds=1000.0)
    experiment = await add_experiment(gateway)
    rollout, _ = await a_working_rollout(gateway, experiment.id)
    await gateway.fleet.drain(rollout, 5.0)

    clock.advance(14.0)
    await gateway.reconciler.reconcile()
    assert gateway.registry.get(rollout).experiment_id == experiment.id

    clock.advance(2.0)
    await gateway.reconciler.reconcile()
    assert gateway.registry.get(rollout).experiment_id is None
    await stop(gateway)


async def test_a_restarted_gateway_remembers_when_a_notice_ends() -> None:
    store, clock = MemoryStore(), ManualClock()
    before = a_gateway(store, clock, lease_seconds=1000.0)
    experiment = await add_experiment(before)
    rollout, observed = await a_working_rollout(before, experiment.id)
    await before.fleet.drain(rollout, 20.0)
    desired = await say(before, rollout, observed)
    clock.advance(7.0)

    after = a_gateway(store, clock, lease_seconds=1000.0, grace_seconds=1000.0)
    await after.repository.load()
    await after.registry.load()

    again = await say(after, rollout, observed)
    assert (again.state, again.notice_seconds, again.tag) == (WorkState.DRAINING, 13.0, desired.tag)
    assert after.registry.view(after.registry.get(rollout)).notice_ends_in_seconds == 13.0
    clock.advance(13.0 + 9.0)
    await after.reconciler.reconcile()
    assert after.registry.get(rollout).experiment_id == experiment.id
    clock.advance(2.0)
    await after.reconciler.reconcile()
    assert after.registry.get(rollout).experiment_id is None, "overdue, as without the restart"
    await stop(after)


async def test_a_notice_that_ended_while_the_gateway_was_away_is_over() -> None:
    store, clock = MemoryStore(), ManualClock()
    before = a_gateway(store, clock)
    experiment = await add_experiment(before)
    rollout, observed = await a_working_rollout(before, experiment.id)
    await before.fleet.drain(rollout, 5.0)
    clock.advance(60.0)

    after = a_gateway(store, clock)
    await after.repository.load()
    await after.registry.load()

    assert (await say(after, rollout, observed)).notice_seconds == 0.0
    assert not after.registry.is_overdue(after.registry.get(rollout)), "it may still say that it has finished"


async def test_a_record_that_drains_without_an_end_gets_the_usual_notice() -> None:
    store = MemoryStore()
    before = a_gateway(store)
    experiment = await add_experiment(before)
    rollout, observed = await a_working_rollout(before, experiment.id)
    await store.apply([PutRecord(replace(before.registry.get(rollout).record, is_draining=True))])

    after = a_gateway(store)
    await after.repository.load()
    await after.registry.load()

    assert (await say(after, rollout, observed)).notice_seconds == DRAIN_NOTICE_SECONDS


async def test_a_service_that_leaves_gets_no_part_in_the_next_publication() -> None:
    gateway = a_gateway()
    experiment = await add_experiment(gateway)
    rollout, _ = await a_working_rollout(gateway, experiment.id)
    assert can_receive(gateway.registry.get(rollout))

    await gateway.fleet.ask_to_leave(gateway.registry.get(rollout), "somebody else's turn", 5.0)

    assert not can_receive(gateway.registry.get(rollout))


async def test_a_service_that_still_works_for_another_experiment_is_not_assigned() -> None:
    gateway = a_gateway()
    await add_experiment(gateway, state=ExperimentState.STARTING)
    late = await add_service(gateway, ServiceKind.TRAINER, "late")
    await say(gateway, late, ObservedState(experiment_id="another", state=WorkState.RUNNING))
    for kind in (ServiceKind.ROLLOUT, ServiceKind.REWARD):
        await add_service(gateway, kind, kind.value)

    await gateway.reconciler.reconcile()
    assert gateway.registry.get(late).experiment_id is None

    await say(gateway, late, ObservedState())
    await gateway.reconciler.reconcile()
    assert gateway.registry.get(late).experiment_id == "tiny-1"
    await stop(gateway)


async def test_a_fatal_failure_fails_the_experiment_with_component_and_cause() -> None:
    gateway = a_gateway()
    experiment = await add_experiment(gateway)
    trainer = await add_service(gateway, ServiceKind.TRAINER, "t", experiment.id)
    failure = Failure(component="trainer", cause="out of memory")

    answer = await say(
        gateway, trainer, ObservedState(experiment_id=experiment.id, state=WorkState.FAILED, failure=failure)
    )

    view = gateway.commands.view(experiment)
    assert view.state is ExperimentState.FAILED and view.problem is not None
    assert (view.problem.component, view.problem.cause) == ("trainer", "out of memory")
    assert answer.state is WorkState.IDLE


async def test_a_failure_that_is_not_fatal_is_an_event_once() -> None:
    gateway = a_gateway()
    experiment = await add_experiment(gateway)
    rollout = await add_service(gateway, ServiceKind.ROLLOUT, "r", experiment.id)
    observed = ObservedState(
        experiment_id=experiment.id,
        state=WorkState.RUNNING,
        policy_version=0,
        failure=Failure(component="engine", cause="restarted", fatal=False),
    )

    await say(gateway, rollout, observed)
    await say(gateway, rollout, observed)

    events = await gateway.store.events(experiment.id, after=0, limit=100)
    assert [event.type for event in events].count("service_recovers") == 1
    assert experiment.state is ExperimentState.RUNNING


async def test_the_failure_of_an_earlier_experiment_is_not_held_against_the_next() -> None:
    gateway = a_gateway()
    experiment = await add_experiment(gateway)
    rollout = await add_service(gateway, ServiceKind.ROLLOUT, "r", experiment.id)

    stale = ObservedState(experiment_id="earlier", state=WorkState.FAILED, failure=Failure(component="x", cause="y"))
    await say(gateway, rollout, stale)

    assert experiment.state is ExperimentState.RUNNING


async def test_steps_and_the_end_of_training_are_taken_from_the_trainer_alone() -> None:
    gateway = a_gateway()
    experiment = await add_experiment(gateway)
    trainer = await add_service(gateway, ServiceKind.TRAINER, "t", experiment.id)
    rollout = await add_service(gateway, ServiceKind.ROLLOUT, "r", experiment.id)

    await say(gateway, rollout, ObservedState(experiment_id=experiment.id, state=WorkState.FINISHED, step=9))
    assert (experiment.record.step, experiment.record.is_trained) == (0, False)

    await say(gateway, trainer, ObservedState(experiment_id=experiment.id, state=WorkState.FINISHED, step=2))
    assert (experiment.record.step, experiment.record.is_trained) == (2, True)


async def test_a_late_report_of_a_trainer_takes_no_step_back_that_is_durable() -> None:
    gateway = a_gateway()
    experiment = await add_experiment(gateway)
    trainer = await add_service(gateway, ServiceKind.TRAINER, "t", experiment.id)
    async with gateway.store.transaction() as change:
        view = CheckpointView(step=12, version=12, path="p", at="2026-01-01T00:00:00Z")
        change.write(PutCheckpoint(experiment.id, view))
        gateway.repository.stage_step(change, experiment, 14)

    await say(gateway, trainer, ObservedState(experiment_id=experiment.id, state=WorkState.RUNNING, step=11))

    assert experiment.record.step == 12


async def test_a_restarted_gateway_finds_its_services_under_a_grace_lease() -> None:
    store, clock = MemoryStore(), ManualClock()
    before = a_gateway(store, clock)
    experiment = await add_experiment(before)
    trainer = await add_service(before, ServiceKind.TRAINER, "t", experiment.id)
    tag = before.fleet.desired(before.registry.get(trainer)).tag

    after = a_gateway(store, clock, grace_seconds=20.0)
    await after.repository.load()
    await after.registry.load()

    clock.advance(19.0)
    assert after.registry.expired() == []
    desired = after.fleet.desired(after.registry.get(trainer))
    assert desired.tag == tag, "a service that is up to date is not disturbed"
    clock.advance(2.0)
    assert len(after.registry.expired()) == 1


async def test_a_change_wakes_exactly_the_services_of_its_experiment() -> None:
    gateway = a_gateway()
    first, second = await add_experiment(gateway, "a"), await add_experiment(gateway, "b")
    mine = [await add_service(gateway, ServiceKind.ROLLOUT, f"a{n}", first.id) for n in range(50)]
    others = [await add_service(gateway, ServiceKind.ROLLOUT, f"b{n}", second.id) for n in range(50)]
    tags = {each: gateway.fleet.desired(gateway.registry.get(each)).tag for each in [*mine, *others]}
    polls = {each: poll(gateway, each, tag) for each, tag in tags.items()}
    await turns()

    await gateway.repository.update(first, policy_version=1)
    await until(lambda: all(polls[each].done() for each in mine))

    assert not any(polls[each].done() for each in others)
    assert all(polls[each].result().policy_version == 1 for each in mine)
    for task in polls.values():
        task.cancel()


async def test_code_rewards_wait_for_a_sandbox() -> None:
    gateway = a_gateway()
    spec = a_spec(reward={"components": [{"kind": "code"}]}).model_dump(mode="json")
    experiment = await add_experiment(gateway, state=ExperimentState.STARTING, spec=spec)
    for kind in (ServiceKind.TRAINER, ServiceKind.ROLLOUT, ServiceKind.REWARD):
        await add_service(gateway, kind, kind.value)

    await gateway.reconciler.reconcile()

    problem = gateway.commands.view(experiment).problem
    assert problem is not None and "sandbox" in problem.cause
    await stop(gateway)


@pytest.mark.parametrize(("experiment_state", "wakes"), [(ExperimentState.PAUSED, 0), (ExperimentState.STARTING, 1)])
async def test_a_service_that_follows_a_pause_or_resume_wakes_no_reconciliation(
    experiment_state: ExperimentState, wakes: int
) -> None:
    gateway = a_gateway()
    experiment = await add_experiment(gateway, state=experiment_state)
    service_id = await add_service(gateway, ServiceKind.REWARD, "one", experiment.id)
    counted: list[None] = []
    gateway.fleet._on_change = lambda: counted.append(None)

    await say(gateway, service_id, ObservedState(experiment_id=experiment.id, state=WorkState.PAUSED))
    assert len(counted) == wakes

    await say(gateway, service_id, ObservedState(experiment_id=experiment.id, state=WorkState.FINISHED))
    assert len(counted) == wakes + 1


@pytest.mark.parametrize("kind", list(ServiceKind))
async def test_a_service_that_was_out_of_reach_comes_back_to_what_it_did(kind: ServiceKind) -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock)
    experiment = await add_experiment(gateway, trainer_epoch=3)
    service_id = await add_service(gateway, kind, "one", experiment.id)
    tag = gateway.fleet.desired(gateway.registry.get(service_id)).tag

    clock.advance(40.0)
    await gateway.reconciler.reconcile()
    assert gateway.registry.find(service_id) is None
    again = await gateway.fleet.register(a_registration(kind, "one"))

    assert again.service_id == service_id
    assert gateway.fleet.desired(gateway.registry.get(service_id)).tag == tag
    assert experiment.record.trainer_epoch == 3
    await stop(gateway)


async def test_a_trainer_that_was_out_of_reach_begins_anew_where_another_has_had_its_place() -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock)
    experiment = await add_experiment(gateway, trainer_epoch=3)
    lost = await add_service(gateway, ServiceKind.TRAINER, "lost", experiment.id)
    clock.advance(20.0)
    await gateway.reconciler.reconcile()
    spare = await add_service(gateway, ServiceKind.TRAINER, "spare")
    for kind in (ServiceKind.ROLLOUT, ServiceKind.REWARD):
        await add_service(gateway, kind, kind.value)
    await gateway.reconciler.reconcile()
    assert (gateway.registry.get(spare).experiment_id, experiment.record.trainer_epoch) == (experiment.id, 4)

    await gateway.fleet.register(a_registration(ServiceKind.TRAINER, "lost"))
    assert gateway.registry.get(lost).experiment_id is None
    clock.advance(20.0)
    await gateway.reconciler.reconcile()
    await gateway.fleet.register(a_registration(ServiceKind.TRAINER, "lost"))

    assert gateway.registry.get(lost).experiment_id is None, "the epoch was another's"
    await stop(gateway)


async def test_a_service_that_left_by_itself_or_was_removed_does_not_come_back_to_its_work() -> None:
    gateway = a_gateway()
    experiment = await add_experiment(gateway)
    first = await add_service(gateway, ServiceKind.ROLLOUT, "one", experiment.id)

    await gateway.fleet.leave(first, reason="an operator removed it")
    again = await gateway.fleet.register(a_registration(ServiceKind.ROLLOUT, "one"))

    assert again.service_id != first
    assert gateway.registry.get(again.service_id).experiment_id is None


async def test_a_rollout_with_other_weights_than_were_published_is_named_with_the_version_until_it_is_right() -> None:
    gateway = a_gateway()
    experiment = await add_experiment(gateway, state=ExperimentState.RUNNING)
    rollout = await add_service(gateway, ServiceKind.ROLLOUT, "r", experiment.id)

    for version, served in (
        (3, ServedWeights(version=3, digest="d3")),
        (None, ServedWeights(version=4, diverged=1, detail="1 of 2 tensors differ")),
        (None, ServedWeights(version=4, diverged=1, detail="1 of 2 tensors differ")),
        (4, ServedWeights(version=4, digest="d4")),
        (5, ServedWeights(version=5, digest="d5")),
    ):
        await say(gateway, rollout, ObservedState(experiment_id=experiment.id, policy_version=version, served=served))

    events = await gateway.store.events(experiment.id, after=0, limit=100)
    told = [(each.type, each.data) for each in events if each.type.startswith("weights_")]
    facts = {"service_id": rollout, "version": 4}
    assert told == [
        ("weights_diverged", facts | {"times": 1, "detail": "1 of 2 tensors differ"}),
        ("weights_mended", facts | {"is_proved": True}),
    ]


async def test_of_one_finding_there_is_one_event_whatever_is_said_of_it_and_whoever_else_says_so() -> None:
    gateway = a_gateway()
    experiment = await add_experiment(gateway, state=ExperimentState.RUNNING)
    kinds = (ServiceKind.ROLLOUT, ServiceKind.REWARD)
    services = [await add_service(gateway, kind, kind, experiment.id) for kind in kinds]
    for number in range(5):
        served = ServedWeights(version=4, diverged=1, detail=f"other words {number}")
        for each in services:
            await say(gateway, each, ObservedState(experiment_id=experiment.id, served=served))

    events = await gateway.store.events(experiment.id, after=0, limit=100)
    told = [each.data["service_id"] for each in events if each.type == "weights_diverged"]
    assert told == services[:1]
    for unbounded in ({"detail": "x" * 1001}, {"digest": "x" * 65}):
        with pytest.raises(ValidationError):
            ServedWeights.model_validate({"version": 4, **unbounded})


async def test_what_a_service_said_before_does_not_stand_where_it_comes_after_what_it_said_later() -> None:
    gateway = a_gateway()
    service_id = await add_service(gateway, ServiceKind.ROLLOUT, "one")

    def device(shift: int, *, held: bool, number: int) -> ObservedState:
        return ObservedState(number=number, device=DeviceReport(shift=shift, is_held=held))

    await say(gateway, service_id, device(3, held=False, number=2))
    await say(gateway, service_id, device(3, held=True, number=1))
    assert gateway.registry.get(service_id).observed.device == DeviceReport(shift=3, is_held=False)

    await say(gateway, service_id, device(5, held=True, number=3))
    assert gateway.registry.get(service_id).observed.device == DeviceReport(shift=5, is_held=True)
    await say(gateway, service_id, device(5, held=False, number=0))
    assert gateway.registry.get(service_id).observed.device == DeviceReport(shift=5, is_held=False)
