"""Deaths are counted within a window; pauses grow; progress makes earlier deaths not count."""

from flotilla.shared.children.restarts import Restarts
from flotilla.shared.clock import ManualClock


def test_pauses_grow_up_to_a_bound_until_there_were_too_many_deaths() -> None:
    restarts = Restarts(5, first_pause_seconds=0.5, growth=4.0, longest_pause_seconds=10.0)

    assert [restarts.died() for _ in range(6)] == [0.5, 2.0, 8.0, 10.0, None, None]


def test_deaths_before_the_window_do_not_count() -> None:
    clock = ManualClock()
    restarts = Restarts(3, window_seconds=30.0, first_pause_seconds=1.0, now=clock.monotonic)

    for _ in range(20):
        assert restarts.died() == 1.0
        assert restarts.died() == 2.0
        clock.advance(30.0)
    assert [restarts.died() for _ in range(3)] == [1.0, 2.0, None]


def test_progress_makes_earlier_deaths_not_count() -> None:
    restarts = Restarts(2, first_pause_seconds=1.0)

    for _ in range(5):
        assert restarts.died() == 1.0
        restarts.forget()
