"""Where the condition of a rule stands along the points of its series."""

from typing import Any

import pytest

from flotilla.services.gateway.monitoring import conditions
from flotilla.services.gateway.monitoring.conditions import Point, Seen, Watch
from flotilla.shared.config.sections.rule import RuleConfig


@pytest.mark.parametrize(
    ("when", "values", "met_at"),
    [
        ({"kind": "plateau", "patience": 2}, [1.0, 2.0, 1.5, 1.9], 4),
        ({"kind": "plateau", "patience": 2}, [1.0, 2.0, 1.5, 2.1, 2.0], None),
        ({"kind": "plateau", "patience": 2, "min_delta": 0.5}, [1.0, 1.4, 1.3], 3),
        ({"kind": "plateau", "patience": 2, "mode": "min"}, [3.0, 2.0, 2.5, 2.0], 4),
        ({"kind": "plateau", "patience": 3}, [1.0, 1.0, 1.0], None),
        ({"kind": "above", "bound": 0.5, "patience": 2}, [0.6, 0.5, 0.6, 0.7, 0.1], 4),
        ({"kind": "below", "bound": 0.5}, [0.5, 0.6, 0.4], 3),
    ],
)
def test_a_condition_is_met_at_the_first_point_that_completes_its_patience(
    when: dict[str, Any], values: list[float], met_at: int | None
) -> None:
    rule = RuleConfig.model_validate({"name": "r", "metric": "reward/mean", "when": when, "then": {"kind": "stop"}})

    watch = Watch()
    watch.add(Point(step, step, value) for step, value in enumerate(values, 1))
    met = watch.look(rule)

    assert (met and met.point.step) == met_at


def a_rule(**when: Any) -> RuleConfig:
    return RuleConfig.model_validate(
        {"name": "r", "metric": "reward/mean", "when": {"kind": "above", "bound": 0.0} | when, "then": {"kind": "stop"}}
    )


def test_steps_that_were_lost_and_are_trained_again_begin_the_patience_again() -> None:
    watch, rule = Watch(), a_rule(patience=5)
    watch.add(Point(step, step, 1.0) for step in (42, 43, 44, 45))
    assert watch.look(rule) is None
    watch.add([Point(41, 41, 1.0)])
    assert watch.look(rule) is None, "four of the lost line and one of the new one are no five in a row"
    watch.add(Point(step, step, 1.0) for step in (42, 43, 44, 45))

    met = watch.look(rule)

    assert met is not None and met.point.step == 45


def test_a_rule_that_acted_on_a_lost_line_sees_the_new_one() -> None:
    watch, rule = Watch(), RuleConfig.model_validate(a_rule().model_dump() | {"times": 2})
    watch.resume(1, 55)
    watch.add([Point(50, 50, 1.0), Point(55, 55, 1.0)])
    assert watch.look(rule) is None
    watch.resume(1, 55)
    watch.add([Point(41, 41, 1.0)])
    watch.resume(1, 55)

    met = watch.look(rule)

    assert met is not None and met.point.step == 41


def test_rows_that_two_readers_bring_count_once() -> None:
    seen, rule = Seen(), a_rule(patience=3)
    rows = [(place, "reward/mean", Point(place, place, 1.0)) for place in (1, 2)]
    seen.add([rule], rows)
    seen.add([rule], rows)

    assert seen.watch(rule).look(rule) is None and seen.watch(rule).num_met == 2 and seen.cursor == 2


def test_points_after_the_one_that_met_it_wait_until_the_rule_has_acted_and_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conditions, "MOST_WAITING", 2)
    watch, rule = Watch(), RuleConfig.model_validate(a_rule().model_dump() | {"times": 2})
    watch.add(Point(step, step, 1.0) for step in range(4))
    first = watch.look(rule)

    assert first is not None and first.point.step == 0 and watch.is_full
    watch.resume(1, 0)
    second = watch.look(rule)
    assert second is not None and second.point.step == 1
    watch.resume(2, 1)
    assert watch.look(rule) is None and not watch.is_full, "it acts no more: nothing waits"
