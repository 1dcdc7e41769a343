"""Busy and idle time, with a clock that is set by hand."""

from flotilla.services.rollout.consumer import BusyTime


def test_overlapping_groups_count_once_and_what_is_left_is_idle() -> None:
    now = [100.0]
    busy = BusyTime(lambda: now[0])
    now[0] = 103.0
    with busy.sampling():
        now[0] = 105.0
        with busy.sampling():
            now[0] = 106.0
        assert busy.to_load() == {"busy_seconds": 3.0, "idle_seconds": 3.0}
        now[0] = 107.0
    now[0] = 110.0
    assert busy.to_load() == {"busy_seconds": 4.0, "idle_seconds": 6.0}
