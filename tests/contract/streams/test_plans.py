"""The trainer's queue: fencing, plans, replay, commit."""

from dataclasses import asdict

import msgpack
import pytest

from flotilla.shared.errors import ClaimLost, NotFound
from flotilla.shared.streams.hop import HopName, Resolution
from flotilla.shared.streams.plane import DataPlane
from flotilla.shared.streams.plans import LINEAGE_STEPS, LOST_WITH_CHECKPOINT, Plan, RolledBack, TrainerQueue
from tests.contract.streams.conftest import World, a_trainer, claim_ids, issue, ledger_of, move_to_scored


async def scored(plane: DataPlane, count: int) -> None:
    await issue(plane, count)
    await move_to_scored(plane, count)


async def test_nothing_is_claimed_before_taking_over(plane: DataPlane) -> None:
    await scored(plane, 1)
    trainer = plane.trainer("trainer")

    with pytest.raises(ClaimLost):
        await trainer.hop.claim(wait_seconds=0)


async def test_incarnations_rise(plane: DataPlane) -> None:
    first, second, third = (plane.trainer("trainer") for _ in range(3))

    assert await first.take_over() == 1
    assert await first.take_over() == 1
    assert await second.take_over() == 2
    assert await third.take_over(7) == 7
    with pytest.raises(ClaimLost, match="incarnation 7"):
        await first.take_over(7)
    with pytest.raises(ClaimLost, match="incarnation 6"):
        await first.take_over(6)


async def test_a_plan_keeps_order_versions_and_tokens(plane: DataPlane) -> None:
    await issue(plane, 3)
    await move_to_scored(plane, 1, version=2)
    await move_to_scored(plane, 2, version=3)
    trainer = await a_trainer(plane)
    claims = (await trainer.hop.claim(3, wait_seconds=0))[::-1]

    assert await trainer.plan(5, claims, version=3)

    plan = await trainer.load_plan(5)
    assert plan is not None
    assert (plan.step, plan.version, plan.group_ids) == (5, 3, (2, 1, 0))
    assert (plan.oldest_version, plan.newest_version) == (2, 3)
    assert plan.token_count == sum(claim.header.token_count for claim in claims)
    ledger = await ledger_of(plane)
    assert (ledger.planned, ledger.outstanding, ledger.claimed.scored) == (3, 0, 0)


async def test_a_step_is_planned_once(plane: DataPlane) -> None:
    await scored(plane, 3)
    trainer = await a_trainer(plane)
    claims = await trainer.hop.claim(2, wait_seconds=0)
    (other,) = await trainer.hop.claim(2, wait_seconds=0)

    assert await trainer.plan(1, claims, version=0)
    assert await trainer.plan(1, claims, version=0), "repeating a plan whose answer was lost is no error"

    assert not await trainer.plan(1, [other], version=0)
    assert not await trainer.plan(2, claims, version=0)
    assert not await trainer.plan(2, [other, claims[0]], version=0)
    assert (await ledger_of(plane)).planned == 2
    assert await trainer.plan(2, [other], version=0)


async def test_a_planned_group_is_neither_claimed_nor_resolved(world: World, plane: DataPlane) -> None:
    await scored(plane, 1)
    trainer = await a_trainer(plane)
    (claim,) = await trainer.hop.claim(wait_seconds=0)
    assert await trainer.plan(1, [claim], version=0)
    await world.let_leases_end()

    (replayed,) = await trainer.replay(1)

    assert await claim_ids(trainer.hop, wait_seconds=0.6) == []
    for each in (claim, replayed):
        assert not await trainer.hop.resolve(each, Resolution.DROPPED, "old")
        assert not await trainer.hop.hand_back(each)
    assert await trainer.hop.renew([claim]) == [claim]


async def test_a_trainers_claims_have_no_lease(world: World, plane: DataPlane) -> None:
    await scored(plane, 2)
    trainer = await a_trainer(plane)
    claims = await trainer.hop.claim(2, wait_seconds=0)

    await world.let_leases_end()

    assert await claim_ids(trainer.hop, wait_seconds=0.6) == []
    assert await trainer.plan(1, claims, version=0)


async def test_a_later_trainer_fences_the_earlier_one(plane: DataPlane) -> None:
    await scored(plane, 4)
    old = await a_trainer(plane)
    assert await old.plan(1, await old.hop.claim(1, wait_seconds=0), version=0)
    held = await old.hop.claim(2, wait_seconds=0)

    new = await a_trainer(plane)

    assert (await ledger_of(plane)).waiting.scored == 3
    with pytest.raises(ClaimLost):
        await old.plan(2, held, version=0)
    with pytest.raises(ClaimLost):
        await old.commit([1])
    with pytest.raises(ClaimLost):
        await old.hop.claim(wait_seconds=1)
    assert not await old.hop.resolve(held[0], Resolution.DROPPED, "old")
    assert await old.hop.renew(held) == held
    taken = [*await new.hop.claim(10, wait_seconds=0), *await new.hop.claim(10, wait_seconds=1)]
    assert sorted(claim.header.group_id for claim in taken) == [1, 2, 3]
    assert {claim.deliveries for claim in taken} == {1}
    assert await claim_ids(new.hop) == []


async def test_a_trainer_hands_groups_back_to_itself(plane: DataPlane) -> None:
    await scored(plane, 2)
    trainer = await a_trainer(plane)
    first, second = await trainer.hop.claim(2, wait_seconds=0)
    assert await trainer.hop.hand_back(first)

    (again,) = await trainer.hop.claim(2, wait_seconds=2)

    assert again.header.group_id == first.header.group_id
    assert await trainer.plan(1, [second, again], version=0)


async def test_a_trainer_filters_a_group(plane: DataPlane) -> None:
    await scored(plane, 1)
    trainer = await a_trainer(plane)
    (claim,) = await trainer.hop.claim(wait_seconds=0)

    assert await trainer.hop.resolve(claim, Resolution.FILTERED, "zero variance")

    assert (await ledger_of(plane)).filtered == {"zero variance": 1}


async def test_a_restarted_trainer_replays_its_plans_in_order(plane: DataPlane) -> None:
    await scored(plane, 5)
    old = await a_trainer(plane)
    claims = await old.hop.claim(5, wait_seconds=0)
    payloads = {claim.header.group_id: claim.payload for claim in claims}
    for step, chosen in ((1, [0, 1]), (2, [4, 2]), (3, [3])):
        assert await old.plan(step, [claims[index] for index in chosen], version=0)
    assert await old.commit([1]) == 1

    new = await a_trainer(plane)

    assert [(plan.step, plan.group_ids) for plan in await new.plans_from(2)] == [(2, (4, 2)), (3, (3,))]
    assert [plan.step for plan in await new.plans_from(3)] == [3]
    replayed = await new.replay(2)
    assert [(claim.header.group_id, claim.payload) for claim in replayed] == [(4, payloads[4]), (2, payloads[2])]
    assert replayed[0].group().task.group_id == 4
    assert await claim_ids(new.hop) == []
    assert await new.commit([2, 3]) == 2
    assert (await ledger_of(plane)).trained == 5


async def test_committing_counts_once_and_keeps_the_lineage(plane: DataPlane) -> None:
    await scored(plane, 3)
    trainer = await a_trainer(plane)
    claims = await trainer.hop.claim(3, wait_seconds=0)
    assert await trainer.plan(1, claims[:2], version=0)
    assert await trainer.plan(2, claims[2:], version=0)
    plan = await trainer.load_plan(1)
    assert plan is not None

    assert await trainer.commit([1]) == 1
    assert await trainer.commit([1]) == 0
    assert await trainer.commit([1, 2, 9]) == 1

    ledger = await ledger_of(plane)
    assert (ledger.planned, ledger.trained, ledger.outstanding) == (0, 3, 0)
    assert ledger.tokens.trained == sum(claim.header.token_count for claim in claims)
    lineage = await trainer.lineage(1)
    assert lineage is not None
    assert (lineage.group_ids, lineage.token_count, lineage.entry_ids) == ((0, 1), plan.token_count, ())
    assert await trainer.load_plan(1) is None
    assert await trainer.lineage(9) is None
    with pytest.raises(NotFound):
        await trainer.replay(1)


async def test_a_group_that_a_checkpoint_contains_is_counted_without_training(plane: DataPlane) -> None:
    await scored(plane, 1)
    trainer = await a_trainer(plane)
    (claim,) = await trainer.hop.claim(wait_seconds=0)

    assert await trainer.resolve_already_trained(claim)

    ledger = await ledger_of(plane)
    assert (ledger.trained, ledger.outstanding, ledger.consumed_since_publication) == (1, 0, 0)


async def test_a_plan_holds_scored_groups_each_once(plane: DataPlane) -> None:
    await scored(plane, 1)
    trainer = await a_trainer(plane)
    (claim,) = await trainer.hop.claim(wait_seconds=0)
    await issue(plane, 1, first=1)
    (task,) = await plane.hop(HopName.TASKS, "rollout").claim(wait_seconds=0)

    with pytest.raises(ValueError, match="none twice"):
        await trainer.plan(1, [claim, claim], version=0)
    with pytest.raises(ValueError, match="at least one"):
        await trainer.plan(1, [], version=0)
    with pytest.raises(ValueError, match="scored hop"):
        await trainer.plan(1, [task], version=0)


async def test_the_lineage_of_a_plan_that_was_forgotten_is_recorded_once(plane: DataPlane) -> None:
    await issue(plane, 2)
    await move_to_scored(plane, 2)
    trainer = await a_trainer(plane)
    first, second = await trainer.hop.claim(2, wait_seconds=0)
    assert await trainer.plan(2, [second], version=1)
    plans = [Plan.of(1, [first], 0), Plan.of(2, [second], 1)]

    assert await trainer.record(plans) == 1
    assert await trainer.record(plans) == 0

    assert await trainer.lineage(2) is None, "its plan stands, to be committed"
    found = await trainer.lineage(1)
    assert found is not None and (found.group_ids, found.entry_ids) == ((first.header.group_id,), ())
    await a_trainer(plane)
    with pytest.raises(ClaimLost):
        await trainer.record(plans)


async def test_the_lineage_is_bounded(plane: DataPlane) -> None:
    await issue(plane, 2)
    await move_to_scored(plane, 2)
    trainer = await a_trainer(plane)
    for step, claim in zip((1, LINEAGE_STEPS + 1), await trainer.hop.claim(2, wait_seconds=0), strict=True):
        assert await trainer.plan(step, [claim], version=0)
        await trainer.commit([step])

    assert await trainer.lineage(1) is None
    assert await trainer.lineage(LINEAGE_STEPS + 1) is not None


async def test_plans_that_are_abandoned_end_with_the_reason(plane: DataPlane) -> None:
    await scored(plane, 3)
    trainer = await a_trainer(plane)
    first, second, third = await trainer.hop.claim(3, wait_seconds=0)
    assert await trainer.plan(1, [first], version=0)
    assert await trainer.plan(2, [second, third], version=1)

    assert await trainer.abandon([2, 9], Resolution.DROPPED, "no_checkpoint") == 2
    assert await trainer.abandon([2], Resolution.DROPPED, "no_checkpoint") == 0

    ledger = await ledger_of(plane)
    assert (ledger.planned, ledger.dropped, ledger.outstanding) == (1, {"no_checkpoint": 2}, 0)
    assert ledger.lengths == {"dropped": {"no_checkpoint": {16: 2}}}
    assert await trainer.load_plan(2) is None
    await a_trainer(plane)
    with pytest.raises(ClaimLost):
        await trainer.abandon([1], Resolution.DROPPED, "no_checkpoint")


async def test_what_only_a_checkpoint_removes_from_the_scored_stream_is_measured(plane: DataPlane) -> None:
    trainer = await a_trainer(plane)
    empty = await trainer.retained()
    assert (empty.size_bytes, empty.bound_bytes, empty.entries, empty.planned) == (0, None, 0, 0)
    await issue(plane, 4)
    await move_to_scored(plane, 4)
    claims = await trainer.hop.claim(3, wait_seconds=0)

    assert await trainer.plan(1, claims[:2], version=0)
    sizes = await plane.admission.bound(5_000_000)
    found = await trainer.retained()

    assert (found.size_bytes, found.bound_bytes) == (sizes[HopName.SCORED], 5_000_000)
    assert (found.entries, found.planned) == (4, 2)
    assert await trainer.commit([1]) == 1
    after = await trainer.retained()
    assert (after.entries, after.planned) == (2, 0)
    assert 0 < after.size_bytes <= found.size_bytes


async def test_the_lowest_group_that_may_still_be_trained_is_found(plane: DataPlane) -> None:
    trainer = await a_trainer(plane)
    assert await trainer.lowest_open() == 0
    await scored(plane, 12)  # of two digits: ids are compared as numbers
    claims = await trainer.hop.claim(12, wait_seconds=0)
    assert await trainer.lowest_open() == 0

    assert await trainer.plan(1, claims[:2], version=0)
    assert await trainer.hop.resolve(claims[2], Resolution.FILTERED, "too_long")
    assert await trainer.lowest_open() == 0, "what is planned may be replayed"
    await trainer.commit([1])
    assert await trainer.lowest_open() == 3
    assert await trainer.plan(2, claims[3:10], version=0)
    await trainer.commit([2])
    assert await trainer.lowest_open() == 10
    assert await trainer.plan(3, claims[10:], version=0)
    assert await trainer.lowest_open() == 10
    await trainer.commit([3])
    assert await trainer.lowest_open() == 12


async def steps_of(plane: DataPlane, *sizes: int) -> TrainerQueue:
    """Plan one step after the other, step ``n`` under version ``n - 1``, of so many groups each."""
    await scored(plane, sum(sizes))
    trainer = await a_trainer(plane)
    for step, size in enumerate(sizes, start=1):
        assert await trainer.plan(step, await trainer.hop.claim(size, wait_seconds=0), version=step - 1)
    return trainer


async def test_steps_that_no_checkpoint_contains_any_more_do_not_count_as_trained(plane: DataPlane) -> None:
    trainer = await steps_of(plane, 2, 2, 1)
    await trainer.commit([1, 2, 3])
    before = await ledger_of(plane)

    assert await trainer.roll_back(1, []) == RolledBack(waiting=0, lost=3)
    assert await trainer.roll_back(1, []) == RolledBack(waiting=0, lost=3), "the first answer may have been lost"
    assert await (await a_trainer(plane)).roll_back(1, []) == RolledBack(0, 0)

    ledger = await ledger_of(plane)
    assert (before.trained, ledger.trained, ledger.dropped) == (5, 2, {LOST_WITH_CHECKPOINT: 3})
    assert ledger.tokens.trained * 5 == before.tokens.trained * 2
    assert ledger.consumed_since_publication == 2, "of step 1 alone"
    assert await trainer.lineage(1) is not None
    assert await trainer.lineage(2) is await trainer.lineage(3) is None


async def test_groups_of_a_plan_that_is_given_up_wait_again(plane: DataPlane) -> None:
    trainer = await steps_of(plane, 1, 2, 1)

    assert await trainer.roll_back(1, [3, 9]) == RolledBack(waiting=1, lost=0)

    ledger = await ledger_of(plane)
    assert (ledger.planned, ledger.outstanding, ledger.consumed_since_publication) == (3, 1, 3)
    assert await trainer.load_plan(3) is None
    (claim,) = await trainer.hop.claim(4, wait_seconds=0)
    assert claim.header.group_id == 3
    assert await trainer.plan(3, [claim], version=7)
    assert await plane.admission.outstanding_older_than(9) == []


async def test_what_a_publication_has_covered_is_not_taken_off_the_budget_again(plane: DataPlane) -> None:
    trainer = await steps_of(plane, 1, 2, 1)
    await trainer.commit([1, 2])
    await plane.admission.published(2)

    await trainer.roll_back(0, [3])

    assert (await ledger_of(plane)).consumed_since_publication == 0


async def test_a_group_that_was_recorded_and_never_came_again_is_not_counted_as_lost(plane: DataPlane) -> None:
    await scored(plane, 2)
    trainer = await a_trainer(plane)
    first, second = await trainer.hop.claim(2, wait_seconds=0)
    await trainer.record([Plan.of(1, [first], 0)])
    assert await trainer.plan(2, [second], version=0)
    await trainer.commit([2])

    assert await trainer.roll_back(0, []) == RolledBack(waiting=0, lost=1)


async def test_only_the_latest_trainer_rolls_back(plane: DataPlane) -> None:
    earlier = await steps_of(plane, 1)
    await a_trainer(plane)

    with pytest.raises(ClaimLost):
        await earlier.roll_back(0, [1])


def test_a_plan_of_an_earlier_release_is_read() -> None:
    plan = Plan(4, 3, (7, 9), ("1-0", "2-0"), 2, 3, token_count=11, token_counts=(6, 5))
    written = msgpack.packb({key: value for key, value in asdict(plan).items() if key != "token_counts"})

    assert Plan.from_bytes(written) == plan
