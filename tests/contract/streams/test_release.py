"""Claims of the dead: freed at once, fenced against those who live after all, and each death counts."""

import pytest

from flotilla.shared.streams.hop import MAX_LOST_BY_THE_LIVING, HopName, holder_name, holder_of
from flotilla.shared.streams.plane import DataPlane
from flotilla.shared.testing.builders import a_group, graded
from tests.contract.streams.conftest import World, a_trainer, claim_ids, issue, ledger_of, move_to_scored


async def test_what_the_dead_held_is_claimed_at_once_and_before_fresh_entries(plane: DataPlane) -> None:
    await issue(plane, 4)
    dead, other = plane.hop(HopName.TASKS, "dead"), plane.hop(HopName.TASKS, "other")
    (held,) = await other.claim(wait_seconds=0)
    assert await claim_ids(dead, 2) == [1, 2]
    assert await plane.holders() == {dead.consumer, other.consumer}

    assert await plane.release({dead.consumer}) == 2

    ledger = await ledger_of(plane)
    assert (ledger.waiting.tasks, ledger.claimed.tasks) == (3, 1)
    assert await plane.holders() == {other.consumer}
    assert await other.forward(held, a_group(held.task()))
    heir = plane.hop(HopName.TASKS, "heir")
    assert await claim_ids(heir, 3) == [1, 2]
    assert await claim_ids(heir, 3) == [3]
    assert await plane.release({dead.consumer}) == 0


async def test_it_holds_for_generated_groups_and_not_for_the_trainers_claims(plane: DataPlane) -> None:
    await issue(plane, 3)
    await move_to_scored(plane, 1)
    trainer = await a_trainer(plane)
    (scored,) = await trainer.hop.claim(1, wait_seconds=0)
    rollout, reward = plane.hop(HopName.TASKS, "rollout"), plane.hop(HopName.GENERATED, "reward")
    for claim in await rollout.claim(2, wait_seconds=0):
        assert await rollout.forward(claim, a_group(claim.task()))
    assert len(await reward.claim(2, wait_seconds=0)) == 2
    assert await plane.holders() == {reward.consumer}

    assert await plane.release({reward.consumer, trainer.hop.consumer}) == 2

    assert await claim_ids(plane.hop(HopName.GENERATED, "heir")) == [1, 2]
    assert await trainer.plan(1, [scored], version=0)


async def test_one_who_lives_after_all_is_fenced_and_may_claim_anew(plane: DataPlane) -> None:
    await issue(plane, 1)
    slow = plane.hop(HopName.TASKS, "slow")
    (lost,) = await slow.claim(wait_seconds=0)
    await plane.release({slow.consumer})

    assert await slow.renew([lost]) == [lost]
    assert not await slow.hand_back(lost)
    assert not await slow.forward(lost, a_group(lost.task()))
    (again,) = await slow.claim(wait_seconds=1)

    assert again.deliveries == 2
    assert not await slow.forward(lost, a_group(lost.task())), "the earlier claim stays lost"
    assert await slow.forward(again, a_group(again.task()))
    assert (await ledger_of(plane)).waiting.generated == 1


async def test_an_entry_that_kills_whoever_claims_it_is_given_up_in_the_end(world: World) -> None:
    plane = world.open(max_deliveries=2)
    await issue(plane, 1)
    for _ in range(2):
        victim = plane.hop(HopName.TASKS, "victim")
        assert await claim_ids(victim) == [0]
        await plane.release({victim.consumer})

    assert await claim_ids(plane.hop(HopName.TASKS, "last")) == []

    assert (await ledger_of(plane)).failed == {"too_many_deliveries": 1}


async def test_a_stream_that_nobody_ever_read_has_no_holders(plane: DataPlane) -> None:
    assert await plane.holders() == set()
    assert await plane.release({"nobody"}) == 0
    assert await plane.release([]) == 0


async def test_a_death_between_grading_and_forwarding_costs_the_grades_alone(plane: DataPlane) -> None:
    await issue(plane, 1)
    rollout = plane.hop(HopName.TASKS, "rollout")
    (claim,) = await rollout.claim(wait_seconds=0)
    await rollout.forward(claim, a_group(claim.task()))
    dead, heir = plane.hop(HopName.GENERATED, "dead"), plane.hop(HopName.GENERATED, "heir")
    (held,) = await dead.claim(wait_seconds=0)
    await plane.release({dead.consumer})
    (taken,) = await heir.claim(wait_seconds=0)

    assert await heir.forward(taken, graded(taken.group(), [0.0, 1.0]))
    assert not await dead.forward(held, graded(held.group(), [1.0, 1.0]))

    ledger = await ledger_of(plane)
    assert (ledger.waiting.scored, ledger.outstanding) == (1, 1)


@pytest.mark.parametrize("incarnation", ["5f1c9a", "with-a-dash"])
async def test_a_consumer_tells_which_process_it_belongs_to(plane: DataPlane, incarnation: str) -> None:
    holder = holder_name("rollout", 12, incarnation)

    assert holder_of(plane.hop(HopName.TASKS, holder).consumer) == holder
    assert holder_of(plane.hop(HopName.TASKS, "rollout-12").consumer) is None


async def test_claims_that_the_living_lost_do_not_count_towards_giving_up(world: World) -> None:
    plane = world.open(max_deliveries=2)
    await issue(plane, 1)
    for _ in range(3):
        paused = plane.hop(HopName.TASKS, "paused")  # a fresh one looks at once for what is free again
        (claim,) = await paused.claim(wait_seconds=0)
        await plane.release({paused.consumer})
        # The process goes on after its pause: once it renews, once it forwards, and says twice what it says.
        assert await paused.renew([claim]) == [claim]
        assert not await paused.forward(claim, a_group(claim.task()))
    victims = [plane.hop(HopName.TASKS, "victim") for _ in range(3)]
    for victim in victims[:2]:
        assert await claim_ids(victim) == [0]
        await plane.release({victim.consumer})

    assert await claim_ids(victims[2]) == []

    assert (await ledger_of(plane)).failed == {"too_many_deliveries": 1}


async def test_an_entry_that_the_living_lose_again_and_again_is_given_up_all_the_same(world: World) -> None:
    plane = world.open(max_deliveries=2)
    await issue(plane, 1)
    for _ in range(2 * MAX_LOST_BY_THE_LIVING):
        slow = plane.hop(HopName.TASKS, "slow")
        (claim,) = await slow.claim(wait_seconds=0)
        await plane.release({slow.consumer})
        assert await slow.renew([claim]) == [claim]

    assert await claim_ids(plane.hop(HopName.TASKS, "last")) == []

    assert (await ledger_of(plane)).failed == {"too_many_deliveries": 1}
