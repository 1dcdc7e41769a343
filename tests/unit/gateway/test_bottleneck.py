"""Each bottleneck, from the figures that it leaves."""

from dataclasses import replace
from typing import Any

import pytest

from services.gateway.experiments.bottleneck import Look, StepTimes, find_bottleneck
from services.gateway.experiments.window import WINDOW_SECONDS, Window
from shared.streams.keys import HopName
from shared.streams.ledger import HopCounts, Ledger

BUDGET = 24


def a_look(
    *, tasks: int = 0, generated: int = 0, scored: int = 0, consumed: int = 0, seconds: float = 0.002, **flags: bool
) -> Look:
    waiting = HopCounts(tasks=tasks, generated=generated, scored=scored)
    ledger = Ledger(
        issued=waiting.total, waiting=waiting, outstanding=waiting.total, consumed_since_publication=consumed
    )
    given: dict[str, Any] = {"is_publishing": False, "is_evaluating": False} | flags
    return Look(ledger, seconds, **given)


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
        ([a_look(tasks=16, seconds=0.4)] * 9, a_step(), "redis"),
        ([a_look(tasks=16), Look(None, 5.0, is_publishing=False, is_evaluating=False)] * 9, a_step(), "redis"),
        ([a_look(is_evaluating=True), a_look(tasks=3, is_evaluating=True)] * 9, a_step(), "evaluation"),
    ],
)
def test_each_bottleneck_is_named(looks: list[Look], step: StepTimes, component: str) -> None:
    found = find_bottleneck(looks, [step] * 5, budget=BUDGET)
    assert found.component == component
    assert found.cause
    assert found.advice


def test_without_a_step_the_queues_decide() -> None:
    assert find_bottleneck([a_look(generated=8)] * 5, [], budget=BUDGET).component == "reward"
    assert find_bottleneck([a_look()] * 5, [], budget=BUDGET).component == "none"


def test_nothing_is_said_of_two_looks() -> None:
    assert find_bottleneck([a_look(tasks=8)] * 2, [a_step()], budget=BUDGET).component == "none"


def test_a_window_forgets_what_is_old_and_keeps_what_is_not() -> None:
    window = Window()
    for second in range(5):
        window.add_look(float(second), a_look(generated=8))
        window.add_step(float(second), {"time/step_seconds": 1.0, "time/wait_seconds": 0.9})
    window.add_step(5.0, {"evaluation/accuracy": 0.5})
    assert window.bottleneck(5.0, budget=BUDGET).evidence["steps"] == 5
    assert window.bottleneck(2.5 + WINDOW_SECONDS, budget=BUDGET).evidence["looks"] == 2
    window.clear()
    assert window.seconds(5.0) == 0
    assert window.bottleneck(5.0, budget=BUDGET).component == "none"


def test_the_longest_wait_of_the_window_is_evidence() -> None:
    looks = [replace(a_look(tasks=3), oldest_seconds={HopName.TASKS: age}) for age in (1.5, 9.25, 0.5)]

    evidence = find_bottleneck(looks, [a_step()], budget=BUDGET).evidence

    assert (evidence["tasks/oldest_seconds"], evidence["scored/oldest_seconds"]) == (9.25, 0.0)
