"""A version's idle ratio, from what rollouts report when they switch."""

import pytest

from services.gateway.monitoring.idleness import Idleness


def load(busy: float, idle: float) -> dict[str, float]:
    return {"busy_seconds": busy, "idle_seconds": idle}


def test_a_versions_ratio_is_over_all_rollouts_by_their_time() -> None:
    idleness = Idleness()
    assert idleness.record("a", 0, load(1, 1)) is None
    assert idleness.record("b", 0, load(5, 0)) is None
    assert idleness.record("a", 0, load(2, 2)) is None
    assert idleness.record("a", 1, load(4, 2)) == (0, pytest.approx(1 / 4))
    assert idleness.record("b", 1, load(5, 4)) == (0, pytest.approx(5 / 8))
    assert idleness.record("a", 2, load(5, 4)) == (1, pytest.approx(2 / 3))


def test_another_life_of_a_rollout_begins_anew() -> None:
    idleness = Idleness()
    idleness.record("a", 3, load(9, 9))
    assert idleness.record("a", 4, load(0.5, 0.5)) is None
    assert idleness.record("a", None, load(1, 1)) is None
    assert idleness.record("a", -1, load(1, 1)) is None
    assert idleness.record("a", 4, {}) is None
    assert idleness.record("a", 5, load(1.5, 0.5)) == (4, 0.0)
