"""Pauses between attempts grow by one rule up to a bound, however long what is waited for is away."""

from flotilla.shared.clock import Pauses, pause_after


def test_each_pause_is_longer_than_the_one_before_up_to_a_bound() -> None:
    assert [pause_after(number, 0.5, 3.0) for number in (1, 2, 3, 4, 5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert [pause_after(number, 0.5, growth=4.0) for number in (1, 2, 3)] == [0.5, 2.0, 8.0]


def test_a_store_that_is_away_for_days_is_still_asked_again() -> None:
    assert pause_after(100_000, 2.0, 60.0) == 60.0


def test_pauses_begin_again_once_something_was_achieved() -> None:
    pauses = Pauses(0.1, 2.0)
    grown = [pauses.failed() for _ in range(6)]
    pauses.reset()

    assert grown == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
    assert pauses.failed() == 0.1
