"""Hops: claim, forward, resolve, hand back, and what happens to holders that stop."""

import asyncio
import time

import pytest

from flotilla.shared.schemas.task import Lane
from flotilla.shared.streams.hop import HopName, Resolution
from flotilla.shared.streams.plane import DataPlane
from flotilla.shared.testing.builders import a_group, a_task, graded
from tests.contract.streams.conftest import World, claim_ids, issue, ledger_of, move_to_scored

WAIT_SECONDS = 30.0
"""Far more than anything takes that a claimer waits for."""


async def test_tasks_are_claimed_in_issue_order_and_once(plane: DataPlane) -> None:
    await issue(plane, 5)
    one, other = plane.hop(HopName.TASKS, "one"), plane.hop(HopName.TASKS, "other")

    assert await claim_ids(one, 3) == [0, 1, 2]
    assert await claim_ids(other) == [3, 4]
    assert await claim_ids(one) == []
    assert (await ledger_of(plane)).claimed.tasks == 5


async def test_a_claim_bears_its_task(plane: DataPlane) -> None:
    task = a_task(0, metadata={"level": 3}, min_version=7)
    await plane.admission.issue(task, limit=1)

    (claim,) = await plane.hop(HopName.TASKS, "rollout").claim(wait_seconds=0)

    assert claim.task() == task
    assert (claim.header.oldest_version, claim.header.size, claim.header.token_count) == (7, 2, 0)
    assert claim.deliveries == 1
    with pytest.raises(ValueError, match="is a task"):
        claim.group()


async def test_a_forwarded_group_arrives_whole(plane: DataPlane) -> None:
    await issue(plane, 1)
    rollout, reward = plane.hop(HopName.TASKS, "rollout"), plane.hop(HopName.GENERATED, "reward")
    (claim,) = await rollout.claim(wait_seconds=0)
    sent = graded(a_group(claim.task(), version=4), [0.0, 1.0])

    assert await rollout.forward(claim, sent)

    (arrived,) = await reward.claim(wait_seconds=0)
    assert arrived.group().body_to_wire() == sent.body_to_wire()
    assert arrived.group().grades_to_wire() == sent.grades_to_wire()
    assert arrived.task() == claim.task()
    header = arrived.header
    assert (header.oldest_version, header.newest_version, header.token_count) == (4, 4, sent.num_sampled)
    assert (header.reward_mean, header.reward_spread) == (0.5, 0.5)
    assert (await ledger_of(plane)).tokens.generated == sent.num_sampled


async def test_many_are_forwarded_at_once_and_each_stands_alone(plane: DataPlane) -> None:
    await issue(plane, 4)
    rollout = plane.hop(HopName.TASKS, "rollout")
    claims = await rollout.claim(4, wait_seconds=0)
    await rollout.hand_back(claims[1])

    done = await rollout.forward_many([(claim, a_group(claim.task())) for claim in claims])

    assert done == [True, False, True, True]
    assert (await ledger_of(plane)).waiting.generated == 3


async def test_a_group_that_cannot_be_forwarded_fails_its_own_sender_alone(plane: DataPlane) -> None:
    await issue(plane, 4)
    rollout = plane.hop(HopName.TASKS, "rollout")
    claims = await rollout.claim(4, wait_seconds=0)
    groups = [a_group(claim.task()) for claim in claims]
    groups[2] = groups[3]

    answers = await asyncio.gather(*map(rollout.forward, claims, groups), return_exceptions=True)

    assert answers[:2] == [True, True] and answers[3] is True
    assert isinstance(answers[2], ValueError)
    assert (await ledger_of(plane)).waiting.generated == 3


async def test_a_claim_twice_among_many_has_effect_once(plane: DataPlane) -> None:
    await issue(plane, 2)
    rollout = plane.hop(HopName.TASKS, "rollout")
    one, other = await rollout.claim(2, wait_seconds=0)

    done = await rollout.forward_many([(claim, a_group(claim.task())) for claim in (one, one, other, one)])

    assert done == [True] * 4
    assert (await ledger_of(plane)).waiting.generated == 2
    assert await rollout.forward_many([]) == []


async def test_more_than_one_script_forwards_is_forwarded(plane: DataPlane) -> None:
    await issue(plane, 300)
    rollout = plane.hop(HopName.TASKS, "rollout")
    claims = await rollout.claim(300, wait_seconds=0)

    assert all(await rollout.forward_many([(claim, a_group(claim.task())) for claim in claims]))

    reward = plane.hop(HopName.GENERATED, "reward")
    assert await claim_ids(reward, 300) == list(range(300))


async def test_many_are_resolved_at_once_and_each_stands_alone(plane: DataPlane) -> None:
    await issue(plane, 4)
    rollout = plane.hop(HopName.TASKS, "rollout")
    claims = await rollout.claim(4, wait_seconds=0)
    await rollout.hand_back(claims[1])

    done = await rollout.resolve_many([*claims, claims[3]], Resolution.DROPPED, "test")

    assert done == [True, False, True, True, True]
    ledger = await ledger_of(plane)
    assert (ledger.dropped, ledger.outstanding, ledger.balanced) == ({"test": 3}, 1, True)
    assert await rollout.resolve_many([], Resolution.DROPPED, "test") == []


async def test_a_claim_of_another_hop_is_refused(plane: DataPlane) -> None:
    await issue(plane, 1)
    rollout, reward = plane.hop(HopName.TASKS, "rollout"), plane.hop(HopName.GENERATED, "reward")
    (claim,) = await rollout.claim(wait_seconds=0)

    for misuse in (
        reward.forward(claim, a_group(claim.task())),
        reward.resolve(claim, Resolution.FAILED, "x"),
        reward.hand_back(claim),
        reward.renew([claim]),
    ):
        with pytest.raises(ValueError, match="claim of the hop tasks"):
            await misuse


async def test_a_repeated_forward_takes_effect_once_and_says_yes_again(plane: DataPlane) -> None:
    await issue(plane, 1)
    rollout = plane.hop(HopName.TASKS, "rollout")
    (claim,) = await rollout.claim(wait_seconds=0)

    answers = [await rollout.forward(claim, a_group(claim.task())) for _ in range(3)]

    assert answers == [True, True, True]
    assert (await ledger_of(plane)).waiting.generated == 1
    assert not await rollout.resolve(claim, Resolution.FAILED, "late")


async def test_a_repeated_resolution_counts_once(plane: DataPlane) -> None:
    await issue(plane, 1)
    rollout = plane.hop(HopName.TASKS, "rollout")
    (claim,) = await rollout.claim(wait_seconds=0)

    answers = [await rollout.resolve(claim, Resolution.DROPPED, "too old") for _ in range(2)]

    assert answers == [True, True]
    ledger = await ledger_of(plane)
    assert ledger.dropped == {"too old": 1}
    assert ledger.outstanding == 0
    assert not await rollout.forward(claim, a_group(claim.task()))


@pytest.mark.parametrize("resolution", [Resolution.FILTERED, Resolution.DROPPED, Resolution.FAILED])
async def test_resolutions_are_counted_by_reason(plane: DataPlane, resolution: Resolution) -> None:
    await issue(plane, 3)
    rollout = plane.hop(HopName.TASKS, "rollout")
    for claim, reason in zip(await rollout.claim(3, wait_seconds=0), ["a", "b", "a"], strict=True):
        assert await rollout.resolve(claim, resolution, reason)

    ledger = await ledger_of(plane)

    assert getattr(ledger, resolution.value) == {"a": 2, "b": 1}
    assert ledger.outstanding == ledger.waiting.total == ledger.claimed.total == 0


async def test_ends_are_counted_by_length(plane: DataPlane) -> None:
    await issue(plane, 5)
    rollout, reward = plane.hop(HopName.TASKS, "rollout"), plane.hop(HopName.GENERATED, "reward")
    # Groups of two: 2, 10, 16 and 130 sampled tokens; the last task fails before any.
    *answered, failed = await rollout.claim(5, wait_seconds=0)
    for claim, tokens in zip(answered, [1, 5, 8, 65], strict=True):
        assert await rollout.forward(claim, a_group(claim.task(), sampled_tokens=tokens))
    assert await rollout.resolve(failed, Resolution.FAILED, "timeout")
    first, *others = await reward.claim(4, wait_seconds=0)
    assert await reward.resolve(first, Resolution.FILTERED, "flat")
    for _ in range(2):  # the answer was lost: the repetition counts nothing
        for claim in others:
            assert await reward.resolve(claim, Resolution.DROPPED, "stale")

    ledger = await ledger_of(plane)

    assert ledger.lengths == {
        "failed": {"timeout": {0: 1}},
        "filtered": {"flat": {2: 1}},
        "dropped": {"stale": {16: 2, 256: 1}},
    }


async def test_a_claim_that_is_not_renewed_is_taken_over(world: World, plane: DataPlane) -> None:
    await issue(plane, 1)
    one, other = plane.hop(HopName.TASKS, "one"), plane.hop(HopName.TASKS, "other")
    (lost,) = await one.claim(wait_seconds=0)

    await world.let_leases_end()
    (taken,) = await other.claim(wait_seconds=1)

    assert (taken.header.group_id, taken.deliveries) == (0, 2)
    assert await one.renew([lost]) == [lost]
    assert not await one.forward(lost, a_group(lost.task()))
    assert not await one.resolve(lost, Resolution.FAILED, "late")
    assert not await one.hand_back(lost)
    assert await other.forward(taken, a_group(taken.task()))
    assert (await ledger_of(plane)).waiting.generated == 1


async def test_a_process_that_takes_its_own_claim_over_holds_only_the_new_one(world: World, plane: DataPlane) -> None:
    await issue(plane, 1)
    rollout = plane.hop(HopName.TASKS, "rollout")
    (old,) = await rollout.claim(wait_seconds=0)
    await world.let_leases_end()
    (new,) = await rollout.claim(wait_seconds=1)

    assert await rollout.renew([old, new]) == [old]
    assert not await rollout.forward(old, a_group(old.task()))
    assert await rollout.forward(new, a_group(new.task()))
    assert not await rollout.forward(old, a_group(old.task()))


async def test_a_renewed_claim_is_not_taken_over(world: World, plane: DataPlane) -> None:
    await issue(plane, 1)
    one, other = plane.hop(HopName.TASKS, "one"), plane.hop(HopName.TASKS, "other")
    (claim,) = await one.claim(wait_seconds=0)

    await world.let_leases_end()
    assert await one.renew([claim]) == []

    assert await claim_ids(other) == []
    assert await one.forward(claim, a_group(claim.task()))


async def test_a_claim_is_renewed_while_its_block_runs(world: World) -> None:
    plane = world.open(lease_seconds=3)
    await issue(plane, 1)
    one, other = plane.hop(HopName.TASKS, "one"), plane.hop(HopName.TASKS, "other")
    (claim,) = await one.claim(wait_seconds=0)

    async with one.renewing(claim) as renewal:
        await world.let_leases_end()
        await asyncio.sleep(one.lease_seconds / 2)
        assert await claim_ids(other, wait_seconds=0.1) == []
        assert not renewal.lost.is_set()

    assert await one.forward(claim, a_group(claim.task()))


async def test_a_holder_is_told_that_its_claim_is_lost(world: World) -> None:
    plane = world.open(lease_seconds=0.3)
    await issue(plane, 2)
    rollout = plane.hop(HopName.TASKS, "rollout")
    kept, lost = await rollout.claim(2, wait_seconds=0)

    async with rollout.renewing(kept, lost) as renewal:
        await rollout.hand_back(lost)
        async with asyncio.timeout(60):
            await renewal.lost.wait()

    assert renewal.lost_claims == [lost]


async def test_what_is_handed_back_is_claimed_next_within_half_a_second(plane: DataPlane) -> None:
    await issue(plane, 2)
    one, other = plane.hop(HopName.TASKS, "one"), plane.hop(HopName.TASKS, "other")
    first, second = await one.claim(2, wait_seconds=0)
    seconds = []
    for _ in range(4):  # a machine that is busy elsewhere delays one of them, not all
        waiting = asyncio.create_task(other.claim(2, wait_seconds=30))
        await asyncio.sleep(0.05)

        assert await one.hand_back(second)
        started = time.monotonic()
        assert (await ledger_of(plane)).waiting.tasks <= 1
        (claim,) = await waiting
        seconds.append(time.monotonic() - started)

        assert (claim.header.group_id, claim.deliveries) == (1, 1)
        assert not await one.forward(second, a_group(second.task()))
        one, other, second = other, one, claim

    assert min(seconds) < 1.0
    assert await one.forward(first, a_group(first.task()))


async def test_handing_back_is_no_delivery(plane: DataPlane) -> None:
    await issue(plane, 1)
    rollout = plane.hop(HopName.TASKS, "rollout")

    for _ in range(3):
        (claim,) = await rollout.claim(wait_seconds=2)
        assert claim.deliveries == 1
        assert await rollout.hand_back(claim)

    assert (await ledger_of(plane)).waiting.tasks == 1


async def test_an_entry_that_nobody_finishes_is_given_up(world: World) -> None:
    plane = world.open(max_deliveries=2)
    await issue(plane, 2)
    first, second, third = (plane.hop(HopName.TASKS, "rollout") for _ in range(3))  # each looks at once for old claims
    await first.claim(1, wait_seconds=0)
    await world.let_leases_end()
    assert [claim.deliveries for claim in await second.claim(1, wait_seconds=1)] == [2]
    await world.let_leases_end()

    assert await claim_ids(third, 2, wait_seconds=1) == [1]

    ledger = await ledger_of(plane)
    assert ledger.failed == {"too_many_deliveries": 1}
    assert ledger.lengths == {"failed": {"too_many_deliveries": {0: 1}}}
    assert ledger.outstanding == 1
    assert await plane.admission.outstanding_older_than(1) == [1]


async def test_a_waiting_claimer_wakes_when_a_task_comes(plane: DataPlane) -> None:
    rollout = plane.hop(HopName.TASKS, "rollout")
    waiting = asyncio.create_task(rollout.claim(wait_seconds=WAIT_SECONDS))
    await asyncio.sleep(0.05)

    await issue(plane, 1)

    async with asyncio.timeout(WAIT_SECONDS / 2):
        assert len(await waiting) == 1


async def test_an_empty_hop_answers_after_the_wait(plane: DataPlane) -> None:
    rollout = plane.hop(HopName.TASKS, "rollout")
    clock = asyncio.get_running_loop().time
    started = clock()

    assert await rollout.claim(wait_seconds=0.2) == []

    assert 0.15 < clock() - started < WAIT_SECONDS


async def test_misuse_is_refused(plane: DataPlane) -> None:
    await issue(plane, 2)
    rollout = plane.hop(HopName.TASKS, "rollout")
    first, _ = await rollout.claim(2, wait_seconds=0)

    with pytest.raises(ValueError, match="cannot forward group 1"):
        await rollout.forward(first, a_group(1))
    with pytest.raises(ValueError, match="without a colon"):
        await rollout.resolve(first, Resolution.FAILED, "a:b")
    with pytest.raises(ValueError, match="use trainer"):
        plane.hop(HopName.SCORED, "thief")


async def test_lanes_keep_apart(world: World) -> None:
    train, evaluation = world.open(), world.open(Lane.EVALUATION)
    await issue(train, 2)
    await issue(evaluation, 3)

    await move_to_scored(evaluation, 3)
    evaluator = evaluation.hop(HopName.SCORED, "evaluator")
    for claim in await evaluator.claim(3, wait_seconds=0):
        assert await evaluator.resolve(claim, Resolution.TRAINED, "evaluated")

    assert (await ledger_of(evaluation)).trained == 3
    ledger = await ledger_of(train)
    assert (ledger.waiting.tasks, ledger.trained) == (2, 0)
    with pytest.raises(ValueError, match="only the train lane"):
        evaluation.trainer("trainer")


async def test_removing_a_lane_leaves_nothing(plane: DataPlane) -> None:
    await issue(plane, 3)
    await move_to_scored(plane, 2)

    await plane.remove()

    ledger = await ledger_of(plane)
    assert (ledger.issued, ledger.waiting.total, ledger.outstanding) == (0, 0, 0)
    assert await plane.admission.next_group_id() == 0
    await issue(plane, 1)
    assert await claim_ids(plane.hop(HopName.TASKS, "rollout")) == [0]
