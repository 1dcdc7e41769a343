"""When what is kept for a replay is in the way of what is to be trained next."""

import pytest

from flotilla.shared.streams.plans import Retained


@pytest.mark.parametrize(
    ("retained", "is_stuck"),
    [
        (Retained(101, 100, 10, 1), True),
        (Retained(100, 100, 10, 10), False),
        (Retained(101, 100, 10, 0), False),  # a checkpoint would remove nothing
        (Retained(101, None, 10, 10), False),
    ],
)
def test_a_full_stream_is_stuck_where_something_of_it_is_planned(retained: Retained, is_stuck: bool) -> None:
    assert retained.is_stuck is is_stuck


@pytest.mark.parametrize(
    ("retained", "is_crowded"),
    [
        (Retained(80, 100, 8, 8), False),  # two more fit exactly
        (Retained(81, 100, 8, 8), True),
        (Retained(81, 100, 8, 4), True),
        (Retained(81, 100, 8, 3), False),  # mostly what waits: a checkpoint would free little
        (Retained(0, 100, 0, 0), False),
        (Retained(81, None, 8, 8), False),
    ],
)
def test_planned_groups_are_in_the_way_where_another_step_would_not_fit(retained: Retained, is_crowded: bool) -> None:
    assert retained.is_crowded_by(2) is is_crowded
