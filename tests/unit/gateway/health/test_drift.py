"""One component that rises at the cost of another, and answers that are all one text, are told of with figures."""

from typing import Any

import pytest

from flotilla.services.gateway.monitoring.health.drift import components_drift, near_duplicates
from flotilla.services.gateway.monitoring.health.evidence import Evidence, StepFigures
from tests.unit.gateway.health.builders import SAMPLES, evidence, graded


def run(count: int = 24, noise: float = 0.01, **slopes: float) -> Evidence:
    """Make steps whose components move by so much from the first to the last."""
    steps = []
    for number in range(count):
        wobble = noise * (-1) ** number
        values = {f"reward/{name}/mean": 0.5 + slope * number / count + wobble for name, slope in slopes.items()}
        steps.append(StepFigures(number + 1, {"reward/mean": 0.5, **values}))
    return evidence(steps=tuple(steps))


def test_a_component_that_rises_while_another_falls_is_named() -> None:
    seen = components_drift(run(style=0.4, answer=-0.4, length=0.0))

    assert seen is not None
    assert "style rose from" in seen.text and "answer fell from" in seen.text
    assert seen.figures["rose"] == pytest.approx(0.2, abs=0.02)


@pytest.mark.parametrize(
    "seen",
    [
        run(style=0.4, answer=0.4),
        run(style=0.4, answer=-0.05),
        run(count=8, style=0.4, answer=-0.4),
        run(noise=2.0, style=0.4, answer=-0.4),
        run(style=0.4),
        evidence(),
    ],
    ids=["both rise", "one stays", "too few steps", "noise", "one component", "none"],
)
def test_what_is_no_drift_is_not_told(seen: Evidence) -> None:
    assert components_drift(seen) is None


@pytest.mark.parametrize(
    ("counts", "is_seen"), [({"alike_groups": 24}, True), ({"alike_groups": 23}, False), ({}, False)]
)
def test_answers_that_nearly_repeat_each_other_are_shown(counts: dict[str, Any], is_seen: bool) -> None:
    seen = near_duplicates(evidence(graded=graded(**counts), alike_samples=SAMPLES))

    assert (seen is not None) is is_seen
    if seen is not None:
        assert seen.samples == SAMPLES
