"""What is missing of an image is fetched once, in order, and what a source left of a range comes first."""

import pytest

from flotilla.shared.weights.pull import source as missing_module
from flotilla.shared.weights.pull.source import MissingRanges


@pytest.fixture(autouse=True)
def _small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missing_module, "RANGE_BYTES", 10)


def test_only_the_beginning_is_fetched_until_the_size_is_known() -> None:
    missing = MissingRanges()

    assert missing.take() == range(10)
    assert missing.take() is None
    missing.learn(25)

    assert [missing.take(), missing.take(), missing.take()] == [range(10, 20), range(20, 25), None]


def test_a_source_beside_which_there_is_no_other_gets_longer_ranges() -> None:
    missing = MissingRanges()

    assert missing.take(is_alone=True) == range(10)
    missing.learn(105)

    assert missing.take(is_alone=True) == range(10, 90)
    assert missing.take() == range(90, 100)
    assert [missing.take(is_alone=True), missing.take(is_alone=True)] == [range(100, 105), None]


def test_the_rest_of_a_range_comes_before_all_others() -> None:
    missing = MissingRanges()
    beginning = missing.take()
    assert beginning is not None
    missing.learn(25)

    missing.settle(beginning, 4)

    assert missing.take() == range(4, 10)


def test_it_is_whole_when_the_last_range_has_come() -> None:
    missing = MissingRanges()
    beginning = missing.take()
    assert beginning is not None
    assert not missing.is_whole
    missing.learn(8)
    assert not missing.is_whole

    missing.settle(beginning, 8)

    assert missing.is_whole


def test_what_is_there_from_the_beginning_on_has_no_gap() -> None:
    missing = MissingRanges()
    beginning = missing.take()
    assert beginning is not None
    missing.learn(25)
    middle, end = missing.take(), missing.take()
    assert middle is not None and end is not None
    assert missing.num_first == 0

    missing.settle(end, 5)
    assert missing.num_first == 0
    missing.settle(beginning, 4)
    assert missing.num_first == 4
    rest = missing.take()
    assert rest == range(4, 10)
    missing.settle(rest, 6)
    assert missing.num_first == 10
    missing.settle(middle, 10)
    assert missing.num_first == 25
