"""Handing over: a task changes hands with the tokens that it has; nothing is lost, nothing is there twice."""

import pytest

from flotilla.shared.schemas.task import Lane
from flotilla.shared.schemas.trajectory import FinishReason, Trajectory
from flotilla.shared.streams.admission import IssueOutcome
from flotilla.shared.streams.hop import HopName, Resolution
from flotilla.shared.streams.partials import Partials
from flotilla.shared.streams.plane import DataPlane
from flotilla.shared.testing.builders import a_group, a_task, a_trajectory
from tests.contract.streams.conftest import World, claim_ids, issue, ledger_of


def a_partial(tokens: int = 4, *, version: int = 2, **fields: object) -> Trajectory:
    return a_trajectory(
        sampled_tokens=tokens, version=version, **{"finish_reason": FinishReason.ABORTED, "text": ""} | fields
    )


def wires(partials: Partials) -> list[object]:
    return [None if member is None else member.to_wire() for member in partials]


@pytest.mark.parametrize("lane", list(Lane))
async def test_the_next_claim_gets_task_and_tokens(world: World, lane: Lane) -> None:
    plane = world.open(lane)
    await issue(plane, 1, version=2)
    one, other = plane.hop(HopName.TASKS, "one"), plane.hop(HopName.TASKS, "other")
    (claim,) = await one.claim(wait_seconds=0)
    assert claim.partials() == ()
    partials = (a_partial(4), a_partial(7, finish_reason=FinishReason.STOP, version=3))

    assert await one.hand_over(claim, partials)

    ledger = await ledger_of(plane)
    assert (ledger.issued, ledger.waiting.tasks, ledger.claimed.tasks, ledger.outstanding) == (1, 1, 0, 1)
    (again,) = await other.claim(wait_seconds=0)
    assert again.task() == claim.task()
    assert wires(again.partials()) == wires(partials)
    assert (again.deliveries, again.header.created_at) == (1, claim.header.created_at)
    assert (again.header.token_count, again.header.oldest_version, again.header.newest_version) == (11, 2, 3)
    assert await other.forward(again, a_group(again.task()))
    assert (await ledger_of(plane)).waiting.generated == 1


async def test_a_member_without_tokens_is_none(plane: DataPlane) -> None:
    await issue(plane, 1)
    hop = plane.hop(HopName.TASKS, "one")
    (claim,) = await hop.claim(wait_seconds=0)

    assert await hop.hand_over(claim, (None, a_partial(3)))

    (again,) = await hop.claim(wait_seconds=1)
    assert again.partials()[0] is None
    assert again.header.token_count == 3


async def test_repeating_it_takes_effect_once_and_says_yes_again(plane: DataPlane) -> None:
    await issue(plane, 1)
    hop = plane.hop(HopName.TASKS, "one")
    (claim,) = await hop.claim(wait_seconds=0)

    answers = [await hop.hand_over(claim, (None, a_partial())) for _ in range(3)]

    assert answers == [True] * 3
    assert (await ledger_of(plane)).waiting.tasks == 1
    assert await claim_ids(hop, 5, wait_seconds=1) == [0]
    assert await hop.hand_over(claim, (None, a_partial())), "also once somebody else holds the task"
    assert (await ledger_of(plane)).claimed.tasks == 1


async def test_a_lost_claim_hands_nothing_over(world: World) -> None:
    plane = world.open()
    await issue(plane, 1)
    slow, quick = plane.hop(HopName.TASKS, "slow"), plane.hop(HopName.TASKS, "quick")
    (lost,) = await slow.claim(wait_seconds=0)
    await world.let_leases_end()
    (held,) = await quick.claim(wait_seconds=0)

    assert not await slow.hand_over(lost, (None, a_partial()))

    assert held.partials() == ()
    ledger = await ledger_of(plane)
    assert (ledger.waiting.tasks, ledger.claimed.tasks) == (0, 1)
    assert await quick.forward(held, a_group(held.task()))
    assert not await slow.hand_over(lost, (None, a_partial()))


async def test_a_claim_that_was_ended_otherwise_hands_nothing_over(plane: DataPlane) -> None:
    await issue(plane, 3)
    hop = plane.hop(HopName.TASKS, "one")
    forwarded, resolved, handed_back = await hop.claim(3, wait_seconds=0)
    await hop.forward(forwarded, a_group(forwarded.task()))
    await hop.resolve(resolved, Resolution.FAILED, "a reason")
    await hop.hand_back(handed_back)

    answers = [await hop.hand_over(claim, (None, a_partial())) for claim in (forwarded, resolved, handed_back)]

    assert answers == [False] * 3
    ledger = await ledger_of(plane)
    assert (ledger.waiting.tasks, ledger.waiting.generated, ledger.failed) == (1, 1, {"a reason": 1})


async def test_a_holder_that_dies_after_a_hand_over_leaves_the_tokens_to_the_next(world: World) -> None:
    plane = world.open()
    await issue(plane, 1)
    first, second, third = (plane.hop(HopName.TASKS, name) for name in ("first", "second", "third"))
    (claim,) = await first.claim(wait_seconds=0)
    await first.hand_over(claim, (a_partial(4), None))
    await second.claim(wait_seconds=0)
    await world.let_leases_end()

    (taken_over,) = await third.claim(wait_seconds=0)

    assert taken_over.deliveries == 2
    assert taken_over.header.token_count == 4


async def test_what_does_not_fit_is_left_out_and_the_rest_kept(world: World) -> None:
    plane = world.open(max_partial_bytes=9 * 40)
    await issue(plane, 1)
    hop = plane.hop(HopName.TASKS, "one")
    (claim,) = await hop.claim(wait_seconds=0)

    assert await hop.hand_over(claim, (a_partial(30), a_partial(20, finish_reason=FinishReason.LENGTH)))

    (again,) = await hop.claim(wait_seconds=1)
    assert again.partials()[0] is None, "33 tokens and 23 are more than 40, and finished members come first"
    assert again.header.token_count == 20
    await hop.hand_over(again, (a_partial(50), a_partial(60)))
    (fresh,) = await hop.claim(wait_seconds=1)
    assert fresh.partials() == ()


async def test_a_wrong_hop_or_a_wrong_number_of_members_is_refused(plane: DataPlane) -> None:
    await issue(plane, 2)
    rollout, reward = plane.hop(HopName.TASKS, "rollout"), plane.hop(HopName.GENERATED, "reward")
    claim, other = await rollout.claim(2, wait_seconds=0)
    await rollout.forward(other, a_group(other.task()))
    (generated,) = await reward.claim(wait_seconds=0)

    with pytest.raises(ValueError, match="only tasks are handed over"):
        await reward.hand_over(generated, (None, None))
    with pytest.raises(ValueError, match="1 partials do not go with a group of 2"):
        await rollout.hand_over(claim, (None,))


async def test_what_was_handed_over_comes_before_fresh_tasks_and_keeps_its_age(world: World) -> None:
    plane = world.open()
    await issue(plane, 3)
    await world.let_time_pass(0.3)
    await issue(plane, 2, first=3)
    one, other = plane.hop(HopName.TASKS, "one"), plane.hop(HopName.TASKS, "other")
    first, second, third = await one.claim(3, wait_seconds=0)
    waited = (await plane.oldest_seconds())[HopName.TASKS]

    assert await one.hand_over(second, (None, a_partial(3)))
    assert await one.forward(first, a_group(first.task()))
    assert await one.forward(third, a_group(third.task()))

    assert (await plane.oldest_seconds())[HopName.TASKS] >= waited
    assert await claim_ids(other, 5) == [1]
    assert await claim_ids(other, 5) == [3, 4]


@pytest.mark.parametrize("end", ["forwarded", "resolved", "given up"])
async def test_the_tokens_take_room_among_the_tasks_until_the_group_has_moved_on(world: World, end: str) -> None:
    plane = world.open(max_deliveries=1)
    await issue(plane, 2)
    one, other = plane.hop(HopName.TASKS, "one"), plane.hop(HopName.TASKS, "other")
    (claim,) = await one.claim(wait_seconds=0)
    before = (await plane.admission.bound(None))[HopName.TASKS]
    assert await one.hand_over(claim, (None, a_partial(20_000)))
    assert (await plane.admission.bound(100_000))[HopName.TASKS] > before + 100_000
    assert (await plane.admission.issue(a_task(2), limit=9)).outcome is IssueOutcome.STREAM_FULL

    (held,) = await other.claim(wait_seconds=0)
    if end == "forwarded":
        assert await other.forward(held, a_group(held.task()))
    elif end == "resolved":
        assert await other.resolve(held, Resolution.FAILED, "a reason")
    else:
        await plane.release({other.consumer})
        assert await claim_ids(plane.hop(HopName.TASKS, "last")) == [1]

    assert (await plane.admission.bound(100_000))[HopName.TASKS] < before + 10_000
    lengths = {} if end == "forwarded" else {"failed": {held_reason(end): {32_768: 1}}}
    assert (await ledger_of(plane)).lengths == lengths, "what was sampled counts, wherever the group ends"


def held_reason(end: str) -> str:
    return "a reason" if end == "resolved" else "too_many_deliveries"


async def test_what_is_handed_over_twice_bears_the_later_tokens(plane: DataPlane) -> None:
    await issue(plane, 1)
    one, other, third = (plane.hop(HopName.TASKS, name) for name in ("one", "other", "third"))
    (claim,) = await one.claim(wait_seconds=0)
    await one.hand_over(claim, (None, a_partial(3)))
    (again,) = await other.claim(wait_seconds=0)

    assert await other.hand_over(again, (a_partial(5), a_partial(8)))

    (last,) = await third.claim(wait_seconds=0)
    assert (last.header.token_count, last.deliveries) == (13, 1)
    assert await one.hand_over(claim, (None, a_partial(3))), "a repetition says yes, and changes nothing"
    assert await third.forward(last, a_group(last.task()))


async def test_lanes_and_removal_leave_nothing_behind(world: World) -> None:
    for lane in Lane:
        plane = world.open(lane)
        await issue(plane, 1)
        hop = plane.hop(HopName.TASKS, "one")
        (claim,) = await hop.claim(wait_seconds=0)
        await hop.hand_over(claim, (None, a_partial(3)))
        await plane.remove()
    if world.redis is not None:
        assert await world.redis.keys(f"*{world.experiment_id}*:handed_over") == []
