"""Whose cancellation a block's end was: the event's, or somebody else's."""

import asyncio
from contextlib import suppress

import pytest

from flotilla.shared.concurrency.cancelling import Happening, cancelled_by, cancelled_with, to_the_end, until_done


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


@pytest.mark.parametrize("is_before", [True, False], ids=["before the block", "within it"])
async def test_what_happens_ends_the_block_without_a_task_that_waits_for_it(is_before: bool) -> None:
    happening, before = Happening(), asyncio.all_tasks()
    if is_before:
        happening.set()
    else:
        asyncio.get_running_loop().call_later(0.001, happening.set)
    with pytest.raises(TooLate), happening.cancelling(TooLate()):
        assert asyncio.all_tasks() == before
        await asyncio.Event().wait()
    current = asyncio.current_task()
    assert current is not None and not current.cancelling()


async def test_a_block_that_lets_it_happen_and_ends_is_not_cancelled_later() -> None:
    happening = Happening()
    with happening.cancelling(TooLate()):
        happening.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with happening.cancelling(TooLate()):
        pass
    await asyncio.sleep(0)


async def test_what_happens_beside_a_cancellation_from_outside_leaves_it_one() -> None:
    happening, is_within = Happening(), asyncio.Event()

    async def work() -> None:
        with happening.cancelling(TooLate()):
            is_within.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await is_within.wait()
    happening.set()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_of_the_block_is_told_whatever_happens() -> None:
    happening = Happening()
    with pytest.raises(KeyError), happening.cancelling(TooLate()):
        happening.set()
        raise KeyError
    await asyncio.sleep(0)


@pytest.mark.parametrize("is_before", [True, False], ids=["before the block", "within it"])
async def test_a_future_that_is_done_ends_the_block_without_a_task_that_waits_for_it(is_before: bool) -> None:
    loop, before = asyncio.get_running_loop(), asyncio.all_tasks()
    future: asyncio.Future[None] = loop.create_future()
    if is_before:
        future.set_result(None)
    else:
        loop.call_later(0.001, future.set_result, None)
    with pytest.raises(TooLate), cancelled_with(future, TooLate()):
        assert asyncio.all_tasks() == before
        await asyncio.Event().wait()
    current = asyncio.current_task()
    assert current is not None and not current.cancelling()


async def test_a_block_that_ends_as_the_future_is_done_is_not_cancelled_later() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with cancelled_with(future, TooLate()):
        future.set_result(None)
    for _ in range(3):
        await asyncio.sleep(0)
    current = asyncio.current_task()
    assert current is not None and not current.cancelling()


async def test_a_future_that_is_cancelled_or_never_done_leaves_the_block_alone() -> None:
    cancelled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with cancelled_with(cancelled, TooLate()):
        cancelled.cancel()
        await asyncio.sleep(0.001)
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with pytest.raises(KeyError), cancelled_with(never, TooLate()):
        raise KeyError
    assert not never.done()


async def test_a_future_that_is_done_beside_a_cancellation_from_outside_leaves_it_one() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    is_within = asyncio.Event()

    async def work() -> None:
        with cancelled_with(future, TooLate()):
            is_within.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await is_within.wait()
    future.set_result(None)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("times", [1, 3])
async def test_what_must_not_be_left_half_way_is_awaited_however_often_its_caller_is_cancelled(times: int) -> None:
    work = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(to_the_end(work))
    await asyncio.sleep(0)

    for _ in range(times):
        waiting.cancel()
        await asyncio.sleep(0)
    assert not waiting.done()
    work.set_result("done")

    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_deadline_that_passes_meanwhile_is_one_all_the_same() -> None:
    work = asyncio.create_task(asyncio.sleep(0.02))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await to_the_end(work)
    assert work.done() and not work.cancelled()


async def test_what_it_comes_to_is_returned_and_an_error_raised_where_it_is_wanted() -> None:
    found, failed = asyncio.get_running_loop().create_future(), asyncio.get_running_loop().create_future()
    found.set_result(3)
    failed.set_exception(TooLate())

    assert await to_the_end(found) == 3
    await until_done(failed)
    with pytest.raises(TooLate):
        await to_the_end(failed)
