"""Whose cancellation a block's end was: the event's, or somebody else's."""

import asyncio
from contextlib import suppress

import pytest

from shared.cancelling import cancelled_by


class TooLate(Exception):
    """What the event is told as."""


async def test_an_event_ends_the_block_as_its_error() -> None:
    event = asyncio.Event()
    with pytest.raises(TooLate):
        async with cancelled_by(event.wait, TooLate(), name="event"):
            event.set()
            await asyncio.Event().wait()
    current = asyncio.current_task()
    assert current is not None and not current.cancelling()


async def test_a_cancellation_from_outside_stays_one_beside_the_event() -> None:
    event, is_within = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        async with cancelled_by(event.wait, TooLate(), name="event"):
            is_within.set()
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            event.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await is_within.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("outcome", ["returns", "raises"])
async def test_a_block_that_ends_by_itself_leaves_nobody_waiting(outcome: str) -> None:
    before = asyncio.all_tasks()
    with suppress(KeyError):
        async with cancelled_by(asyncio.Event().wait, TooLate(), name="event"):
            if outcome == "raises":
                raise KeyError
    assert asyncio.all_tasks() == before
