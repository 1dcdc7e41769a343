"""Forwards at the same time share calls; what befalls one of them leaves the others alone."""

import asyncio
import itertools
from collections.abc import Sequence

import pytest

from flotilla.shared.errors import Unavailable
from flotilla.shared.streams.redis.forwarding import ForwardsTogether


class Calls:
    """Takes calls and answers each when told."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.may_answer = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self, entries: Sequence[int]) -> list[bool]:
        self.sizes.append(len(entries))
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return [entry != 3 for entry in entries]


async def started(calls: Calls, together: ForwardsTogether[int], count: int) -> list[asyncio.Task[bool]]:
    tasks = [asyncio.create_task(together.forward(number)) for number in range(count)]
    while not calls.sizes:
        await asyncio.sleep(0)
    return tasks


async def test_forwards_that_wait_for_another_go_together_and_get_their_own_answers() -> None:
    calls = Calls()
    tasks = await started(calls, ForwardsTogether(calls), 5)

    calls.may_answer.set()

    assert await asyncio.gather(*tasks) == [True, True, True, False, True]
    assert calls.sizes == [1, 4]


async def test_a_cancelled_sender_leaves_the_others_to_send_themselves() -> None:
    calls = Calls()
    first, *others = await started(calls, ForwardsTogether(calls), 4)
    first.cancel()
    while len(calls.sizes) < 2:
        await asyncio.sleep(0)

    others[0].cancel()  # it was sending for all of them
    calls.may_answer.set()

    with pytest.raises(asyncio.CancelledError):
        await others[0]
    assert await asyncio.gather(*others[1:]) == [True, False]
    assert calls.sizes == [1, 3, 2]


async def test_a_server_that_is_away_fails_all_that_go_together_at_once() -> None:
    calls = Calls()
    calls.error = Unavailable("no answer")
    tasks = await started(calls, ForwardsTogether(calls), 4)

    calls.may_answer.set()

    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(answer, Unavailable) for answer in answers)
    assert calls.sizes == [1, 3]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
async def test_what_the_server_refuses_of_one_fails_that_one_only(order: tuple[int, ...]) -> None:
    async def picky(entries: Sequence[int]) -> list[bool]:
        await asyncio.sleep(0)
        if 2 in entries:
            raise ValueError("not this one")
        return [True for _ in entries]

    together = ForwardsTogether(picky)

    answers = await asyncio.gather(*(together.forward(number) for number in order), return_exceptions=True)

    assert {number: repr(answer) for number, answer in zip(order, answers, strict=True)} == {
        0: "True",
        1: "True",
        2: "ValueError('not this one')",
        3: "True",
    }


async def test_a_sender_cancelled_while_each_goes_alone_leaves_the_rest_to_send_themselves() -> None:
    calls, is_alone = list[tuple[int, ...]](), asyncio.Event()

    async def picky(entries: Sequence[int]) -> list[bool]:
        calls.append(tuple(entries))
        await asyncio.sleep(0)
        if len(entries) == 3:
            raise ValueError("one of them")
        if entries == [1]:
            is_alone.set()
            await asyncio.Event().wait()
        return [True for _ in entries]

    together = ForwardsTogether(picky)
    first, second, *others = [asyncio.create_task(together.forward(number)) for number in range(4)]
    await is_alone.wait()

    second.cancel()

    with pytest.raises(asyncio.CancelledError):
        await second
    assert await asyncio.gather(first, *others) == [True, True, True]
    assert calls == [(0,), (1, 2, 3), (1,), (2, 3)]
