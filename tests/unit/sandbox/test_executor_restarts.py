"""When a fork server that programs end may be started again."""

import asyncio

from flotilla.services.sandbox.executor import (
    FIRST_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    WINDOW_SECONDS,
    ServerRestarts,
)
from flotilla.shared.clock import ManualClock


def test_pauses_grow_up_to_a_bound_and_what_is_long_ago_does_not_count() -> None:
    clock = ManualClock()
    starts = ServerRestarts(clock.monotonic)
    pauses = []

    for _ in range(8):
        starts.ended(0, "who")
        before = clock.monotonic()
        while starts.num_backing_off([0]):
            clock.advance(FIRST_PAUSE_SECONDS / 2)
        pauses.append(clock.monotonic() - before)
    clock.advance(WINDOW_SECONDS)
    starts.ended(0, "who")
    clock.advance(FIRST_PAUSE_SECONDS)

    assert pauses == [min(FIRST_PAUSE_SECONDS * 2**number, LONGEST_PAUSE_SECONDS) for number in range(8)]
    assert starts.num_backing_off([0]) == 0
    assert starts.num_ended == 9


def test_slots_pause_by_themselves() -> None:
    starts = ServerRestarts(ManualClock().monotonic)

    starts.ended(3, "who")

    assert (starts.num_backing_off([0, 1, 2]), starts.num_backing_off([2, 3])) == (0, 1)


def test_a_start_is_counted_to_whoever_ended_the_server_before_once() -> None:
    starts = ServerRestarts(ManualClock().monotonic)
    starts.ended(0, "first")
    starts.ended(0, "second")

    charged = [starts.charged(0), starts.charged(0), starts.charged(1)]

    assert charged == ["second", None, None]


async def test_nobody_waits_for_a_start_when_the_service_stops() -> None:
    clock = ManualClock()
    starts = ServerRestarts(clock.monotonic)
    starts.ended(0, "who")
    waiting = asyncio.create_task(starts.due(0))
    await asyncio.sleep(0)
    assert not waiting.done()

    starts.close()

    await waiting
