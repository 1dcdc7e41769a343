"""What a chart is drawn from: few points, and every peak."""

import pytest
from hypothesis import given
from hypothesis import strategies as some

from flotilla.services.gateway.page.thinning import in_common, thinned


def test_a_short_series_stays_as_it_is() -> None:
    assert thinned([3.0, 1.0, 2.0], 4) == [0, 1, 2]


def test_a_single_peak_in_ten_thousand_values_stays() -> None:
    values = [0.0] * 10_000
    values[4_321], values[7_777] = 9.0, -9.0

    assert {0, 4_321, 7_777, 9_999} <= set(thinned(values, 50))


@given(some.lists(some.floats(-1e6, 1e6), max_size=300), some.integers(4, 60))
def test_the_places_ascend_are_no_more_than_asked_for_and_hold_both_extremes(values: list[float], points: int) -> None:
    places = thinned(values, points)

    assert places == sorted(set(places))
    assert len(places) <= points
    if values:
        kept = [values[place] for place in places]
        assert (kept[0], kept[-1]) == (values[0], values[-1])
        assert (min(kept), max(kept)) == (min(values), max(values))


def test_too_few_points_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 4"):
        thinned([1.0], 3)


@given(some.lists(some.integers(0, 10_000), unique=True, max_size=300).map(sorted), some.integers(4, 60))
def test_common_steps_are_of_the_series_and_leave_room_for_the_extremes(steps: list[int], points: int) -> None:
    common = in_common(steps, points)

    assert common == sorted(set(common)) and set(common) <= set(steps)
    assert len(common) <= points - 4
    assert bool(common) == (points >= 7 and bool(steps))
