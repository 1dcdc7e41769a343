"""Forwards at the same time share calls; what befalls one of them leaves the others alone."""

import asyncio
from collections.abc import Sequence

import pytest

from shared.errors import Unavailable
from shared.schemas.trajectory import Group
from shared.streams.codec import encode_body, group_header
from shared.streams.hop import Claim
from shared.streams.keys import HopName
from shared.streams.redis.forwarding import ForwardsTogether
from shared.testing.builders import a_group

Results = Sequence[tuple[Claim, Group]]


class Calls:
    """Takes calls and answers each when told."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.may_answer = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self, results: Results) -> list[bool]:
        self.sizes.append(len(results))
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return [claim.header.group_id != 3 for claim, _ in results]


def a_result(number: int) -> tuple[Claim, Group]:
    group = a_group(number)
    return Claim(HopName.GENERATED, f"{number}-0", group_header(group), encode_body(group), 1, "me"), group


async def started(calls: Calls, together: ForwardsTogether, count: int) -> list[asyncio.Task[bool]]:
    tasks = [asyncio.create_task(together.forward(*a_result(number))) for number in range(count)]
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


async def test_what_one_is_at_fault_for_fails_that_one_only() -> None:
    async def picky(results: Results) -> list[bool]:
        await asyncio.sleep(0)
        if any(claim.header.group_id == 2 for claim, _ in results):
            raise ValueError("not the claimed one")
        return [True for _ in results]

    together = ForwardsTogether(picky)

    answers = await asyncio.gather(
        *(together.forward(*a_result(number)) for number in (0, 2, 1, 3)), return_exceptions=True
    )

    assert [repr(answer) for answer in answers] == ["True", "ValueError('not the claimed one')", "True", "True"]
