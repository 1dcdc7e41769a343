"""The distance between engine and trainer is compared with what it was: a small one that grows is told of."""

from collections.abc import Sequence

import pytest

from flotilla.services.gateway.monitoring.health.evidence import StepFigures
from flotilla.services.gateway.monitoring.health.updates import engine_gap_grows
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
