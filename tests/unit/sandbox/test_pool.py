"""Whose turn it is."""

import asyncio
from collections.abc import Container
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from flotilla.services.sandbox import pool as pool_module
from flotilla.services.sandbox.isolation import Slot
from flotilla.services.sandbox.pool import SlotPool
from flotilla.shared.errors import DeadlineExceeded, Unavailable


def a_pool(
    num_slots: int, *, spare: int = 0, max_queued: int = 10, queue_seconds: float = 5.0, bounded: Container[str] = ()
) -> SlotPool:
    slots = [Slot(number, None, Path("/s")) for number in range(num_slots)]
    return SlotPool(
        slots,
        spare=spare,
        max_queued=max_queued,
        queue_seconds=queue_seconds,
        has_one=lambda caller: caller in bounded,
    )


class Callers:
    """Takes slots of a pool and gives them back one by one."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self.order: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._leave: dict[str, list[asyncio.Event]] = {}

    async def ask(self, caller: str, times: int = 1) -> None:
        for _ in range(times):
            self._tasks.append(asyncio.create_task(self._take(caller)))
        await self._settle()

    async def leave(self, caller: str) -> None:
        self._leave[caller].pop(0).set()
        await self._settle()

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _take(self, caller: str) -> None:
        async with self._pool.taken(caller):
            self.order.append(caller)
            leaving = asyncio.Event()
            self._leave.setdefault(caller, []).append(leaving)
            await leaving.wait()

    async def _settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)


async def test_turns_are_taken_and_given_back() -> None:
    pool = a_pool(1, max_queued=1, queue_seconds=0.02)

    async with pool.taken() as slot:
        assert (slot.number, pool.num_running) == (0, 1)
        with pytest.raises(DeadlineExceeded):
            async with pool.taken():
                pass
        waiting = asyncio.create_task(pool.taken().__aenter__())
        await asyncio.sleep(0)
        assert pool.num_waiting == 1
        with pytest.raises(Unavailable):
            async with pool.taken():
                pass
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    await pool.settled()
    assert (pool.num_running, pool.num_waiting) == (0, 0)


async def test_a_flood_leaves_slots_to_others_at_once() -> None:
    callers = Callers(a_pool(8, spare=4))

    await callers.ask("flood", 9)
    await callers.ask("second", 3)
    await callers.ask("third", 3)
    await callers.ask("fourth", 3)

    assert callers.order == ["flood"] * 4 + ["second"] * 2 + ["third", "fourth"]
    await callers.end()


async def test_who_holds_fewest_is_next_and_a_flood_waits_behind_itself() -> None:
    callers = Callers(a_pool(4, spare=0))
    await callers.ask("flood", 9)
    await callers.ask("honest", 3)
    assert callers.order == ["flood"] * 4

    for _ in range(3):
        await callers.leave("flood")

    # Two each, and then again who asked first.
    assert callers.order[4:] == ["honest", "honest", "flood"]
    await callers.leave("honest")
    assert callers.order[7:] == ["honest"]
    await callers.end()


async def test_who_is_bounded_runs_one_program_at_a_time_until_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "LOOK_SECONDS", 0.0)
    bounded: set[str] = set()
    callers = Callers(a_pool(8, spare=4, bounded=bounded))
    await callers.ask("flood", 3)
    bounded.add("flood")

    await callers.ask("flood", 3)
    await callers.ask("honest")
    await callers.leave("flood")
    await callers.leave("flood")
    while_bounded = list(callers.order)
    await callers.leave("flood")
    one_by_one = callers.order[4:]
    bounded.clear()
    while len(callers.order) < 7:
        await asyncio.sleep(0)

    assert while_bounded == ["flood"] * 3 + ["honest"]
    assert one_by_one == ["flood"]
    assert callers.order[5:] == ["flood", "flood"]
    await callers.end()


async def test_nothing_is_run_for_who_hung_up_while_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "LOOK_SECONDS", 0.0)
    pool, has_hung_up = a_pool(1), False

    async with pool.taken("first"):
        waiting = asyncio.create_task(pool.taken("second", lambda: has_hung_up).__aenter__())
        await asyncio.sleep(0.01)
        assert pool.num_waiting == 1
        has_hung_up = True
        with pytest.raises(Unavailable, match="hung up"):
            await waiting

    assert pool.num_waiting == 0


async def test_a_flood_does_not_fill_the_queue() -> None:
    pool = a_pool(1, max_queued=4)
    callers = Callers(pool)
    await callers.ask("flood", 9)
    assert pool.num_waiting == 4

    await callers.ask("honest", 9)
    await callers.ask("late", 9)

    assert pool.num_waiting == 4 + 2 + 1
    await callers.end()
    assert (pool.num_waiting, pool.num_running) == (0, 0)


async def test_a_turn_that_comes_as_its_caller_leaves_goes_to_the_next() -> None:
    pool = a_pool(1)
    async with AsyncExitStack() as holding:
        await holding.enter_async_context(pool.taken("first"))
        leaving = asyncio.create_task(pool.taken("second").__aenter__())
        staying = asyncio.create_task(pool.taken("third").__aenter__())
        await asyncio.sleep(0)
        leaving.cancel()

    slot = await staying

    assert (slot.number, pool.num_running) == (0, 1)


async def test_slots_that_are_out_of_use_are_tried_though_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "LOOK_SECONDS", 0.0)
    tried: list[int] = []
    seen: list[int] = []

    async def renewed(slot: Slot) -> Slot | None:
        tried.append(slot.number)
        await asyncio.sleep(0)
        seen.append(pool.num_out_of_use)
        return slot if len(tried) > 3 else None

    pool = SlotPool([Slot(0, None, Path("/s"))], max_queued=1, queue_seconds=5.0, renewed=renewed)
    async with pool.taken():
        pass
    await pool.settled()
    assert (pool.num_out_of_use, pool.usable, pool.num_running) == (1, [], 0)

    while pool.num_out_of_use:
        await asyncio.sleep(0)

    assert tried == [0] * 4
    assert seen == [0, 1, 1, 1]  # while it is tried it is out of use still
    async with pool.taken() as slot:
        assert slot.number == 0
    await pool.close()


async def test_a_pool_that_is_closed_tries_no_more() -> None:
    tried: list[int] = []

    async def renewed(slot: Slot) -> Slot | None:
        tried.append(slot.number)
        return None

    pool = SlotPool([Slot(0, None, Path("/s"))], max_queued=1, queue_seconds=5.0, renewed=renewed)
    async with pool.taken():
        pass

    await pool.close()

    assert tried == [0]
