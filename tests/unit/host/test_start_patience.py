"""A start that gets on is given more time, one that stands still is not."""

import pytest

from flotilla.shared.errors import InvalidRequest
from flotilla.shared.host.start_patience import LONGEST, StartDeadline, patience_from


class Start:
    """A start whose time and progress are set by hand."""

    def __init__(self, seconds: float, patience: float = 1.0) -> None:
        self.now = self.computed = 0.0
        self.deadline = StartDeadline(seconds, lambda: self.computed, patience=patience, now=lambda: self.now)


def test_a_start_that_stands_still_is_over_after_its_time() -> None:
    start = Start(60)

    start.now, start.computed = 59.0, 0.1

    assert start.deadline.left() == pytest.approx(1.0)


def test_what_computes_has_its_whole_time_again() -> None:
    start = Start(60)

    start.now, start.computed = 59.0, 3.0

    assert start.deadline.left() == pytest.approx(60.0)


def test_a_process_that_was_started_again_gets_on() -> None:
    start = Start(60)
    start.now, start.computed = 30.0, 20.0
    assert start.deadline.left() == pytest.approx(60.0)

    start.now, start.computed = 80.0, 1.0

    assert start.deadline.left() == pytest.approx(60.0)


def test_what_computes_without_an_end_is_given_up() -> None:
    start = Start(60)
    for minute in range(1, LONGEST):
        start.now = start.computed = 60.0 * minute
        assert start.deadline.left() > 0

    start.now = start.computed = 60.0 * LONGEST

    assert start.deadline.left() <= 0


def test_one_variable_scales_the_time() -> None:
    assert Start(60, patience_from({"FLOTILLA_START_PATIENCE": "2.5"})).deadline.left() == pytest.approx(150.0)
    assert patience_from({}) == 1.0


@pytest.mark.parametrize("text", ["0", "-1", "long", "inf", "nan"])
def test_patience_that_is_no_number_above_0_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="FLOTILLA_START_PATIENCE must be a number above 0"):
        patience_from({"FLOTILLA_START_PATIENCE": text})
