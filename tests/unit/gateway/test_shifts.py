"""Devices change hands when somebody needs them and nobody else does; nobody is asleep for ever."""

import pytest

from services.gateway.registry.shifts import PATIENCE_SECONDS, Need, holder_of, is_clear, next_shift, who_holds
from shared.schemas.service import DeviceReport, ServiceKind

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
