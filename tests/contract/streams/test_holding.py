"""Work on a claim ends with the claim: the block that holds it is cancelled as soon as it is lost."""

import asyncio

import pytest

from flotilla.shared.errors import ClaimLost
from flotilla.shared.streams.holding import holding
from flotilla.shared.streams.hop import HopName
from flotilla.shared.testing.builders import a_group
from tests.contract.streams.conftest import World, issue, ledger_of

LEASE_SECONDS = 0.3


async def test_the_block_of_a_lost_claim_is_ended(world: World) -> None:
    plane = world.open(lease_seconds=LEASE_SECONDS)
    await issue(plane, 1)
    hop = plane.hop(HopName.TASKS, "rollout")
    (claim,) = await hop.claim(wait_seconds=0)

    with pytest.raises(ClaimLost, match=f"{claim.entry_id} of the hop tasks"):
        async with asyncio.timeout(10), holding(hop, claim):
            assert await plane.release([claim.consumer]) == 1
            await asyncio.Event().wait()

    task = asyncio.current_task()
    assert task is not None and not task.cancelling()
    (again,) = await hop.claim(wait_seconds=1)
    assert await hop.forward(again, a_group(again.task()))


async def test_a_claim_that_is_held_is_renewed_as_long_as_the_block_lasts(world: World) -> None:
    plane = world.open(lease_seconds=LEASE_SECONDS)
    await issue(plane, 1)
    hop = plane.hop(HopName.TASKS, "rollout")
    (claim,) = await hop.claim(wait_seconds=0)

    async with holding(hop, claim):
        await asyncio.sleep(3 * LEASE_SECONDS)

    assert await hop.forward(claim, a_group(claim.task()))


async def test_a_cancellation_from_outside_stays_one(world: World) -> None:
    plane = world.open(lease_seconds=LEASE_SECONDS)
    await issue(plane, 1)
    hop = plane.hop(HopName.TASKS, "rollout")
    (claim,) = await hop.claim(wait_seconds=0)
    is_inside = asyncio.Event()

    async def hold() -> None:
        async with holding(hop, claim):
            is_inside.set()
            await asyncio.Event().wait()

    held = asyncio.create_task(hold())
    await is_inside.wait()
    held.cancel()

    with pytest.raises(asyncio.CancelledError):
        await held
    assert (await ledger_of(plane)).claimed.tasks == 1


async def test_an_error_of_the_block_leaves_as_it_is(world: World) -> None:
    plane = world.open(lease_seconds=LEASE_SECONDS)
    await issue(plane, 1)
    hop = plane.hop(HopName.TASKS, "rollout")
    (claim,) = await hop.claim(wait_seconds=0)

    with pytest.raises(KeyError, match="of the block"):
        async with holding(hop, claim):
            raise KeyError("of the block")
