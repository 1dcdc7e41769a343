"""Each bottleneck, from the figures that it leaves."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from flotilla.services.gateway.monitoring.bottleneck import Bottleneck, Look, StepTimes, find_bottleneck
from flotilla.services.gateway.monitoring.health.measurements import ENOUGH_STEPS, MIN_SECONDS, WINDOW_SECONDS, Window
from flotilla.shared.streams.hop import HopName
from flotilla.shared.streams.ledger import HopCounts, Ledger

GIVEN = {"budget": 24, "groups_per_step": 8}


def a_look(
    *, tasks: int = 0, generated: int = 0, scored: int = 0, consumed: int = 0, seconds: float = 0.002, **flags: bool
) -> Look:
    waiting = HopCounts(tasks=tasks, generated=generated, scored=scored)
    ledger = Ledger(
        issued=waiting.total, waiting=waiting, outstanding=waiting.total, consumed_since_publication=consumed
    )
    given: dict[str, Any] = {"is_publishing": False, "is_evaluating": False} | flags
    return Look(ledger, seconds, **given)


def named(looks: list[Look], steps: Sequence[StepTimes] = ()) -> Bottleneck:
    return find_bottleneck(looks, steps, **GIVEN)


def a_step(**times: float) -> StepTimes:
    defaults: dict[str, Any] = {"total": 1.0, "waited": 0.6, "paced": 0.0, "published": 0.0}
    return StepTimes(**(defaults | times))


@pytest.mark.parametrize(
    ("looks", "step", "component"),
    [
        ([a_look(tasks=16)] * 9, a_step(), "generation"),
        ([a_look(tasks=2, generated=14)] * 9, a_step(), "reward"),
        ([a_look(scored=16)] * 9, a_step(waited=0.05), "trainer"),
        ([a_look(tasks=16), a_look(consumed=24)] * 9, a_step(), "admission"),
        ([a_look(tasks=4)] * 9, a_step(waited=0.1, published=0.5), "publication"),
        ([a_look(is_publishing=True), a_look(is_publishing=True), a_look(tasks=8)] * 3, a_step(), "publication"),
        ([a_look(is_publishing=True), a_look(), a_look(tasks=8)] * 3, a_step(), "admission"),
        ([a_look(tasks=16)] * 9, a_step(paced=0.5), "admission"),
        ([a_look(generated=2), a_look(), a_look(tasks=1)] * 3, a_step(), "admission"),
        ([a_look(tasks=16, seconds=0.4)] * 9, a_step(), "redis"),
        ([a_look(tasks=16)] * 30 + [a_look(tasks=16, seconds=0.4)] * 4, a_step(), "redis"),
        ([a_look(tasks=16), Look(None, 5.0, is_publishing=False, is_evaluating=False)] * 9, a_step(), "redis"),
        ([a_look(is_evaluating=True), a_look(tasks=3, is_evaluating=True)] * 9, a_step(), "evaluation"),
    ],
)
def test_each_bottleneck_is_named(looks: list[Look], step: StepTimes, component: str) -> None:
    found = named(looks, [step] * 5)
    assert found.component == component
    assert found.cause
    assert found.advice


@pytest.mark.parametrize(
    ("looks", "component"),
    [
        ([a_look(generated=7)] * 5, "reward"),
        ([a_look(tasks=4, scored=7)] * 5, "generation"),
        ([a_look(tasks=4, scored=8)] * 5, "trainer"),
        ([a_look(consumed=8)] * 5, "trainer"),
        ([a_look(consumed=8), a_look(tasks=8)] * 2 + [a_look(tasks=8)], "generation"),
        ([a_look(consumed=8, is_publishing=True)] * 5, "publication"),
        ([a_look(scored=8, is_publishing=True)] * 5, "publication"),
        ([a_look(is_evaluating=True)] * 5, "evaluation"),
        ([a_look()] * 5, "none"),
        ([Look(None, 5.0, is_publishing=False, is_evaluating=False)] * 5, "redis"),
    ],
)
def test_without_a_step_who_has_the_groups_decides(looks: list[Look], component: str) -> None:
    found = named(looks)

    assert found.component == component
    assert found.cause
    assert found.advice


def test_a_trainer_that_only_saves_is_told_so() -> None:
    found = named([a_look(scored=16)] * 5, [a_step(waited=0.05, saved=0.7)])

    assert found.component == "trainer"
    assert "checkpoints for 70%" in found.cause
    assert "every_steps" in found.advice


def test_nothing_is_said_of_two_looks() -> None:
    assert named([a_look(tasks=8)] * 2, [a_step()]).component == "none"


def test_a_window_forgets_what_is_old_and_keeps_what_is_not() -> None:
    window = Window()
    for second in range(5):
        window.add_look(float(second), a_look(generated=8))
        window.add_step(float(second), {"time/step_seconds": 1.0, "time/wait_seconds": 0.9})
    window.add_step(5.0, {"evaluation/accuracy": 0.5})
    assert window.bottleneck(5.0, **GIVEN).evidence["steps"] == 5
    assert window.bottleneck(2.5 + WINDOW_SECONDS, **GIVEN).evidence["looks"] == 2
    window.clear()
    assert window.seconds(5.0) == 0
    assert window.bottleneck(5.0, **GIVEN).component == "none"


def test_of_fast_steps_only_the_last_seconds_count() -> None:
    window = Window()
    for second in range(60):
        is_late = second >= 60 - MIN_SECONDS
        window.add_look(float(second), a_look(tasks=8) if is_late else a_look(generated=8))
        window.add_step(float(second), {"time/step_seconds": 1.0, "time/wait_seconds": 0.9})

    found = window.bottleneck(59.0, **GIVEN)

    assert found.component == "generation"
    assert found.evidence["reward/busy_share"] < 0.2
    assert MIN_SECONDS <= window.seconds(59.0) < MIN_SECONDS + 1


def test_slow_steps_are_looked_at_until_there_are_enough() -> None:
    window = Window()
    for second in range(60):
        window.add_look(float(second), a_look(tasks=8))
        if second % 10 == 9:
            window.add_step(float(second), {"time/step_seconds": 10.0, "time/wait_seconds": 9.0})

    assert window.bottleneck(59.0, **GIVEN).evidence["steps"] == ENOUGH_STEPS
    assert window.seconds(59.0) == 10.0 * ENOUGH_STEPS


def test_a_step_that_does_not_end_makes_the_others_history() -> None:
    window = Window()
    for second in range(10):
        window.add_look(float(second), a_look(tasks=8))
        window.add_step(float(second), {"time/step_seconds": 1.0, "time/wait_seconds": 0.9})
    for second in range(10, 20):
        window.add_look(float(second), a_look(consumed=8))

    found = window.bottleneck(19.0, **GIVEN)

    assert (found.component, found.evidence["steps"]) == ("trainer", 0)
    assert window.seconds(19.0) == 9.0


def test_the_longest_wait_of_the_window_is_evidence() -> None:
    looks = [replace(a_look(tasks=3), oldest_seconds={HopName.TASKS: age}) for age in (1.5, 9.25, 0.5)]

    evidence = named(looks, [a_step()]).evidence

    assert (evidence["tasks/oldest_seconds"], evidence["scored/oldest_seconds"]) == (9.25, 0.0)
