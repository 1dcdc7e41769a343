"""Devices change hands when somebody needs them and nobody else does; nobody is asleep for ever."""

import pytest

from flotilla.services.gateway.registry.shifts import (
    PATIENCE_SECONDS,
    SHARERS,
    Need,
    holder_of,
    is_clear,
    next_shift,
    who_holds,
)
from flotilla.services.gateway.runtime.shifts import Shifts
from flotilla.shared.clock import ManualClock
from flotilla.shared.schemas.service import DeviceOrder, DeviceReport, ObservedState, ServiceKind, WorkState
from flotilla.shared.streams.ledger import Ledger
from tests.unit.gateway.builders import a_gateway, add_experiment, add_service, say, spec_document
from tests.unit.gateway.test_watchdog import a_watchdog

TRAINERS, ROLLOUTS = 5, 6
"""Numbers of shifts."""
BUSY = Need(rollouts_work=True)
IDLE = Need(rollouts_work=False)


def report(shift: int, *, held: bool = False, wanted: bool = False) -> DeviceReport:
    return DeviceReport(shift=shift, is_held=held, is_wanted=wanted)


def test_trainer_and_rollouts_alternate() -> None:
    assert [holder_of(shift) for shift in (1, 2, 3)] == [
        ServiceKind.TRAINER,
        ServiceKind.ROLLOUT,
        ServiceKind.TRAINER,
    ]


def test_devices_are_clear_when_everybody_else_has_said_so_in_this_very_shift() -> None:
    assert is_clear(7, [])
    assert is_clear(7, [report(7), report(7)])
    assert not is_clear(7, [report(7), report(6)])
    assert not is_clear(7, [report(7), report(7, held=True)])
    assert not is_clear(7, [None])


@pytest.mark.parametrize(
    ("trainer", "need", "changes"),
    [
        (report(TRAINERS, held=True, wanted=True), BUSY, False),
        (report(TRAINERS, held=True), BUSY, True),
        (report(TRAINERS, held=True), IDLE, False),
        (report(TRAINERS, held=True), Need(rollouts_work=False, is_pinned=True), True),
        (report(TRAINERS, held=True), Need(rollouts_work=True, is_publishing=True), False),
        (report(TRAINERS - 1), BUSY, False),
        (None, BUSY, False),
    ],
)
def test_a_trainer_keeps_the_devices_until_it_needs_them_no_longer(
    trainer: DeviceReport | None, need: Need, changes: bool
) -> None:
    assert next_shift(TRAINERS, {"t": trainer}, {}, need) == TRAINERS + changes


def test_a_trainer_that_is_gone_leaves_nobody_asleep() -> None:
    assert next_shift(TRAINERS, {}, {"r": report(TRAINERS)}, BUSY) == TRAINERS + 1


@pytest.mark.parametrize(
    ("wanted", "need", "changes"),
    [
        (True, BUSY, False),
        (True, IDLE, True),
        (False, IDLE, False),
        (True, Need(rollouts_work=True, waited_seconds=PATIENCE_SECONDS), True),
        (True, Need(rollouts_work=True, is_pinned=True, waited_seconds=PATIENCE_SECONDS), False),
    ],
)
def test_rollouts_keep_the_devices_while_they_have_work_and_a_trainer_waits_for_so_long(
    wanted: bool, need: Need, changes: bool
) -> None:
    trainer = {"t": report(ROLLOUTS, wanted=wanted)}

    assert next_shift(ROLLOUTS, trainer, {"r": report(ROLLOUTS, held=True)}, need) == ROLLOUTS + changes


def test_rollouts_that_are_gone_leave_the_devices_to_a_trainer_that_can_train() -> None:
    assert next_shift(ROLLOUTS, {"t": report(ROLLOUTS, wanted=True)}, {}, IDLE) == ROLLOUTS + 1


def test_a_shift_that_services_know_and_the_database_has_forgotten_goes_on() -> None:
    assert next_shift(3, {"t": report(8)}, {"r": report(7)}, BUSY) == 8


def test_those_who_still_hold_the_devices_are_named() -> None:
    rollouts = {"r1": report(TRAINERS), "r2": report(TRAINERS, held=True), "r3": None}

    assert who_holds(TRAINERS, {}, rollouts) == ["r2", "r3"]


async def test_the_gateway_lets_nobody_load_before_all_others_have_released_and_names_who_does_not() -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock)
    experiment = await add_experiment(gateway, spec=spec_document(resources={"sharing": "time"}))
    trainer, rollout = [await add_service(gateway, kind, kind.value, experiment.id) for kind in SHARERS]
    shifts = Shifts(
        experiment,
        gateway.repository,
        gateway.registry,
        gateway.publications,
        clock,
        gateway.feeder_status.of(experiment),
        gateway.measurements.of(experiment).lending,
    )

    async def told(service_id: str, device: DeviceReport) -> DeviceOrder:
        is_rollout = service_id == rollout
        state = ObservedState(
            experiment_id=experiment.id,
            state=WorkState.RUNNING,
            policy_version=0 if is_rollout else None,
            device=device,
        )
        order: DeviceOrder = (await say(gateway, service_id, state)).device
        return order

    assert (await told(rollout, report(1))).may_hold is False
    assert (await told(trainer, report(1, held=True))).may_hold is True
    gateway.feeder_status.of(experiment).ledger = Ledger()
    await shifts.look()

    assert await told(rollout, report(1)) == DeviceOrder(shift=2, may_hold=False)
    assert await told(trainer, report(2, held=True)) == DeviceOrder(shift=2, may_hold=False)
    assert (await told(rollout, report(2))).may_hold is False
    watchdog = a_watchdog(gateway, clock)
    await watchdog.look()
    clock.advance(31.0)
    await watchdog.look()
    problem = gateway.commands.view(experiment).problem
    assert problem is not None
    assert problem.cause == f"rollout waits for devices that {trainer} has not released (shift 2)"

    await told(trainer, report(2))
    assert (await told(rollout, report(2))).may_hold is True


def test_trainers_of_several_hosts_keep_the_devices_while_any_of_them_needs_them() -> None:
    busy, done = report(TRAINERS, held=True, wanted=True), report(TRAINERS, held=True)

    assert next_shift(TRAINERS, {"a": done, "b": busy}, {}, BUSY) == TRAINERS
    assert next_shift(TRAINERS, {"a": done, "b": None}, {}, BUSY) == TRAINERS
    assert next_shift(TRAINERS, {"a": done, "b": done}, {}, BUSY) == TRAINERS + 1


def test_rollouts_wait_for_the_trainers_of_all_hosts() -> None:
    freed, held = report(ROLLOUTS), report(ROLLOUTS, held=True)

    assert who_holds(ROLLOUTS, {"a": freed, "b": held}, {"c": None}) == ["b"]
    assert who_holds(ROLLOUTS, {"a": freed, "b": freed}, {"c": None}) == []
