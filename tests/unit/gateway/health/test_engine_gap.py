"""The distance between engine and trainer is compared with what it was: a small one that grows is told of."""

from collections.abc import Sequence

import pytest

from flotilla.services.gateway.monitoring.health.evidence import StepFigures
from flotilla.services.gateway.monitoring.health.gaps import rollout_differs
from flotilla.services.gateway.monitoring.health.measurements import Measurements
from flotilla.services.gateway.monitoring.health.updates import engine_gap_grows
from flotilla.services.gateway.monitoring.health.window import HealthWindow
from tests.unit.gateway.health.builders import FIGURES, evidence

USUAL = [0.0010, 0.0012, 0.0011, 0.0009] * 4


def seen(gaps: Sequence[float], **figures: float) -> bool:
    steps = tuple(StepFigures(n + 1, FIGURES | figures | {"ratio/approx_kl": gap}) for n, gap in enumerate(gaps))
    return engine_gap_grows(evidence(steps=steps)) is not None


@pytest.mark.parametrize(
    ("gaps", "is_seen"),
    [
        ([*USUAL, 0.01, 0.02, 0.03], True),
        ([*USUAL, 0.0013, 0.0014, 0.0013], False),
        ([*USUAL, 0.03, 0.0010, 0.03], False),
        ([*USUAL[:8], 0.01, 0.02, 0.03], False),
        ([each / 100 for each in [*USUAL, 0.01, 0.02, 0.03]], False),
    ],
    ids=["grows", "within the band", "not in a row", "too few before", "rounding"],
)
def test_a_gap_that_leaves_its_band_is_told(gaps: Sequence[float], is_seen: bool) -> None:
    assert seen(gaps) is is_seen


def test_of_older_tokens_nothing_is_concluded() -> None:
    assert not seen([*USUAL, 0.01, 0.02, 0.03], **{"lag/max": 1.0})


def of_rollouts(**gaps: Sequence[float]) -> str | None:
    """Say which rollout is seen to differ; the last values of each are of the newest steps."""
    num_steps = max(map(len, gaps.values()))
    steps = []
    for number in range(num_steps):
        own = {
            name: values[number - num_steps + len(values)]
            for name, values in gaps.items()
            if number >= num_steps - len(values)
        }
        steps.append(StepFigures(number + 1, FIGURES | {f"engine_gap/{name}": gap for name, gap in own.items()}))
    found = rollout_differs(evidence(steps=tuple(steps)))
    return None if found is None else found.text.split()[3]


@pytest.mark.parametrize(
    ("gaps", "name"),
    [
        ({"r1": USUAL, "r2": [0.02] * 3, "r3": USUAL}, "r2"),
        ({"r1": USUAL, "r2": [0.02, 0.05, 0.4], "r3": [0.02, 0.05, 0.3]}, "r2"),
        ({"r1": USUAL, "r2": USUAL[1:], "r3": USUAL}, None),
        ({"r1": USUAL, "r2": [0.02, 0.001, 0.02], "r3": USUAL}, None),
        ({"r1": [*USUAL, 0.02, 0.02, 0.02]}, None),
        ({"r1": USUAL[:8], "r2": [0.02] * 3}, None),
    ],
    ids=["one is far", "the farther of two", "all alike", "not in a row", "alone", "too little of the others"],
)
def test_a_rollout_that_leaves_the_band_of_the_others_is_named(
    gaps: dict[str, Sequence[float]], name: str | None
) -> None:
    assert of_rollouts(**gaps) == name


def test_what_rollouts_were_compared_by_outlives_the_gateway() -> None:
    window = HealthWindow()
    window.add_step(1, {"engine_gap/r1": 0.25, "engine_gap_of_another": 1.0})

    again = HealthWindow()
    again.restore(window.to_window(), is_same_start=True)

    assert again.evidence(evidence().facts).steps[0].values == {"engine_gap/r1": 0.25}


def test_metrics_have_the_rollouts_that_took_part_in_the_newest_step_with_gaps() -> None:
    measured = Measurements()
    measured.add_step(0.0, 1, {"engine_gap/r1": 0.25, "engine_gap/r2": 0.5, "reward/mean": 1.0})
    measured.add_step(1.0, 2, {"reward/mean": 1.0})
    assert {name: value for name, value in measured.latest.items() if "gap" in name} == {
        "engine_gap/r1": 0.25,
        "engine_gap/r2": 0.5,
    }

    measured.add_step(2.0, 3, {"engine_gap/r2": 0.125})

    assert {name: value for name, value in measured.latest.items() if "gap" in name} == {"engine_gap/r2": 0.125}
