"""Where the condition of a rule stands along the points of its series."""

from typing import Any

import pytest

from flotilla.services.gateway.monitoring.conditions import Point, standing
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

    met = standing(rule, [Point(step, step, value) for step, value in enumerate(values, 1)]).met

    assert (met and met.point.step) == met_at
