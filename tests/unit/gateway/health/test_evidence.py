"""The checks over windows that real runs left: every prefix of a healthy one is healthy, the others are named.

``windows.json`` holds the steps' figures and the counts of what was graded, of short runs of the arithmetic
example: two that learn, and some with a learning rate or rewards that are far too large.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from flotilla.services.gateway.monitoring.health.checks import find
from flotilla.services.gateway.monitoring.health.evidence import Evidence, Graded, Sampled, StepFigures
from flotilla.shared.config.sections.health import CheckName
from tests.unit.gateway.health.builders import SAMPLES, facts

WINDOWS: dict[str, Any] = json.loads(Path(__file__).with_name("windows.json").read_text())


def found_after(name: str, num_steps: int) -> list[CheckName]:
    """Name what is found after so many steps, and of all groups once there are all steps."""
    window = WINDOWS[name]
    steps = [StepFigures(number, values) for number, values in enumerate(window["steps"][:num_steps], start=1)]
    graded = Graded(**window["graded"]) if num_steps == len(window["steps"]) else Graded()
    evidence = Evidence(
        facts=facts(),
        graded=graded,
        graded_ever=graded,
        sampled=Sampled(prompts=graded.groups, completions=graded.samples),
        steps=steps,
        last_reward=window["last_reward"],
        highest_reward=1.0,
        lowest_reward=0.0,
        samples=SAMPLES,
    )
    return [each.check.name for each in find(evidence)]


@pytest.mark.parametrize("name", ["filtered", "small_batches", "learning_rate_0.003"])
def test_a_run_that_learns_is_healthy_after_each_of_its_steps(name: str) -> None:
    assert [found_after(name, number) for number in range(len(WINDOWS[name]["steps"]) + 1)] == [
        [] for _ in range(len(WINDOWS[name]["steps"]) + 1)
    ]


@pytest.mark.parametrize(
    ("name", "check", "step"),
    [
        ("learning_rate_1", CheckName.DIVERGING, 2),
        ("learning_rate_0.03", CheckName.DIVERGING, 2),
        ("huge_rewards", CheckName.NOT_FINITE, 1),
    ],
)
def test_what_breaks_is_named_at_the_step_that_shows_it(name: str, check: CheckName, step: int) -> None:
    assert found_after(name, step - 1) == []
    assert all(found_after(name, number)[0] is check for number in range(step, len(WINDOWS[name]["steps"]) + 1))


def test_what_is_chosen_of_a_step_is_looked_for_once() -> None:
    looked: list[str] = []

    def small(values: Mapping[str, float]) -> dict[str, float]:
        looked.extend(values)
        return {name: value for name, value in values.items() if value < 1}

    step = StepFigures(1, {"kl": 0.5, "loss": 2.0})

    assert step.chosen(small) == step.chosen(small) == {"kl": 0.5}
    assert looked == ["kl", "loss"]
