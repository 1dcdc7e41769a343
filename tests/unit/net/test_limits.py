"""Refusals of who has no token, by address."""

import logging

import pytest

from flotilla.shared.clock import ManualClock
from flotilla.shared.net.server.limits import MOST_ADDRESSES, Strangers


def test_an_address_has_a_burst_and_then_a_rate() -> None:
    clock = ManualClock(100.0)
    strangers = Strangers(3, 0.5, clock.monotonic)

    at_once = [strangers.refused("a") for _ in range(5)]
    clock.advance(2.0)
    later = [strangers.refused("a") for _ in range(2)]
    clock.advance(3600.0)
    rested = [strangers.refused("a") for _ in range(4)]

    assert at_once == [0, 0, 0, 2, 2]
    assert later == [0, 2]
    assert rested == [0, 0, 0, 2]


def test_addresses_do_not_disturb_each_other() -> None:
    strangers = Strangers(1, 1.0, ManualClock(0.0).monotonic)

    assert [strangers.refused(address) for address in ("a", "a", "b")] == [0, 1, 0]


def test_a_flood_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock(0.0)
    strangers = Strangers(1, 0.01, clock.monotonic)

    with caplog.at_level(logging.WARNING):
        for _ in range(130):
            strangers.refused("a")
            clock.advance(0.5)

    assert len(caplog.records) == 2


def test_as_many_addresses_as_there_are_take_no_more_memory() -> None:
    strangers = Strangers(1, 1.0, ManualClock(0.0).monotonic)

    for number in range(MOST_ADDRESSES + 10):
        strangers.refused(str(number))
        strangers.refused(str(number))

    assert len(strangers._left) == MOST_ADDRESSES
    assert len(strangers._logged_at) <= MOST_ADDRESSES
