"""Memory that rises with the steps is told of; what rises once, or by chance, is not."""

import random
from collections.abc import Callable

import pytest

from flotilla.services.gateway.monitoring.health.evidence import MemorySlope
from flotilla.services.gateway.monitoring.health.memory import MOST_POINTS, MemorySeries, memory_creeps
from flotilla.shared.config.sections.health import HealthConfig
from tests.unit.gateway.health.builders import evidence, facts
from tests.unit.gateway.health.builders import found as found_checks

MB = 10**6


def series(of_step: Callable[[int], float], count: int = 60, every: int = 20) -> MemorySeries:
    """Report the memory of an engine, in megabytes by the step."""
    found = MemorySeries()
    for number in range(count):
        step = every * (number + 1)
        load = {"memory/engine": of_step(step) * MB, "running": 4.0}
        found.add("rollout-1", "rollout", step, load)
    return found


def noise(step: int) -> float:
    return random.Random(step).gauss(0, 2)


def test_a_slope_is_in_bytes_for_100_steps_after_the_warm_up() -> None:
    found = series(lambda step: 500 + (step if step < 200 else 200) + 0.03 * step)
    (slope,) = found.slopes()

    assert slope.process == "rollout/engine" and slope.service_id == "rollout-1"
    assert slope.slope == pytest.approx(3 * MB)
    assert slope.steps == 880 and slope.rises


def test_memory_that_creeps_is_named_with_its_slope() -> None:
    seen = memory_creeps(evidence(memory=series(lambda step: 500 + 0.05 * step + noise(step)).slopes()))

    assert seen is not None
    assert "rollout/engine of rollout-1 has" in seen.text and "MB more for every 100" in seen.text
    assert seen.figures["bytes_per_100_steps"] == pytest.approx(5 * MB, rel=0.1)


@pytest.mark.parametrize(
    "of_step",
    [
        lambda step: 500 + noise(step),
        lambda step: 500 + (0 if step < 600 else 80) + noise(step),
        lambda step: 500 + 0.005 * step,
        lambda step: 900 - 0.1 * step,
    ],
    ids=["noise", "one jump", "below the bound", "it falls"],
)
def test_memory_that_does_not_creep_is_no_finding(of_step: Callable[[int], float]) -> None:
    assert memory_creeps(evidence(memory=series(of_step).slopes())) is None


def test_a_short_run_has_no_slope() -> None:
    assert series(lambda step: 5.0 * step, count=14).slopes() == ()
    assert series(lambda step: 5.0 * step, every=4).slopes() == ()


def test_the_bound_is_of_the_spec() -> None:
    slope = MemorySlope("trainer-1", "trainer/worker", 9e9, 5.0 * MB, 0.1 * MB, 900, rises=True)
    wide = facts(thresholds=HealthConfig(memory_slope=8.0))

    assert memory_creeps(evidence(memory=(slope,))) is not None
    assert memory_creeps(evidence(memory=(slope,), facts=wide)) is None
    assert found_checks(memory=(slope,)) == ["memory_creeps"]


def test_a_long_run_keeps_few_points_and_its_slope() -> None:
    found = series(lambda step: 500 + 0.03 * step, count=5 * MOST_POINTS, every=3)
    (slope,) = found.slopes()

    assert slope.slope == pytest.approx(3 * MB, rel=0.01)
    assert len(found._series["rollout-1", "rollout/engine"].steps) <= MOST_POINTS


def test_steps_that_are_trained_again_replace_their_points() -> None:
    found = series(lambda step: 500.0)
    found.add("rollout-1", "rollout", 400, {"memory/engine": 700.0 * MB})

    assert found._series["rollout-1", "rollout/engine"].steps[-2:] == [380, 400]
    assert found.newest() == {"rollout/engine": 700.0 * MB}


def test_the_newest_figure_of_a_kind_is_that_of_its_largest_service() -> None:
    found = series(lambda step: 500.0)
    found.add("rollout-2", "rollout", 5, {"memory/engine": 600.0 * MB})

    assert found.newest() == {"rollout/engine": 600.0 * MB}
    found.clear()
    assert found.newest() == {}
