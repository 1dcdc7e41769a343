"""Answers that come later: taken once, in time, and remembered by neither side alone."""

import asyncio

from flotilla.shared.streams.mailbox import Delivery, Mailbox, wait_for_answer
from tests.contract.streams.conftest import World


def opened(world: World) -> Mailbox:
    return world.open().mailbox


async def over(mailbox: Mailbox, name: str, world: World, seconds: float) -> None:
    """Let the deadline pass: on the twin's clock, or by waiting for the server's."""
    world.seconds += seconds
    async with asyncio.timeout(5):
        while (found := await mailbox.find(name)) is not None and found.seconds_left > 0:
            await asyncio.sleep(0.005)


async def test_an_answer_is_taken_once(world: World) -> None:
    mailbox = opened(world)
    await mailbox.expect("a", key="k", seconds=60)

    assert await mailbox.deliver("a", b"1") is Delivery.TAKEN
    assert await mailbox.deliver("a", b"1") is Delivery.AGAIN
    assert await mailbox.deliver("a", b"2") is Delivery.OTHER
    assert await mailbox.deliver("b", b"1") is Delivery.UNKNOWN
    found = await mailbox.find("a")
    assert found is not None and (found.key, found.answer) == ("k", b"1")


async def test_expecting_again_keeps_key_deadline_and_answer(world: World) -> None:
    mailbox = opened(world)
    await mailbox.expect("a", key="first", seconds=60)
    await mailbox.accept("a")
    await mailbox.deliver("a", b"1")

    found = await mailbox.expect("a", key="second", seconds=6000)

    assert (found.key, found.is_accepted, found.answer) == ("first", True, b"1")
    assert found.seconds_left <= 60


async def test_a_late_answer_is_not_taken(world: World) -> None:
    mailbox = opened(world)
    await mailbox.expect("a", seconds=0.02)
    await over(mailbox, "a", world, 0.03)

    assert await mailbox.deliver("a", b"1") is Delivery.LATE
    assert await wait_for_answer(mailbox, "a") is None


async def test_who_waits_gets_the_answer_when_it_comes(world: World) -> None:
    mailbox = opened(world)
    await mailbox.expect("a", seconds=60)
    waiting = asyncio.create_task(wait_for_answer(mailbox, "a"))
    await asyncio.sleep(0)

    await mailbox.deliver("a", b"\x00\xff")

    assert await waiting == b"\x00\xff"


async def test_nobody_waits_for_what_was_never_expected(world: World) -> None:
    assert await wait_for_answer(opened(world), "a") is None
