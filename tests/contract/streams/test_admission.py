"""Admission: the budget, the cursor, publications."""

import asyncio
import time

import pytest

from flotilla.shared.schemas.task import Lane
from flotilla.shared.streams.admission import IssueOutcome, IssueResult
from flotilla.shared.streams.hop import HopName, Resolution, StreamKeys
from flotilla.shared.streams.plane import DataPlane
from flotilla.shared.testing.builders import a_group, a_task, graded
from tests.contract.streams.conftest import World, a_trainer, issue, ledger_of, move_to_scored

AGE_SECONDS = 0.3
CLOCK_SECONDS = 0.01
"""What the server's milliseconds may round off."""


async def test_tasks_are_issued_up_to_the_budget(plane: DataPlane) -> None:
    tasks = [a_task(group_id) for group_id in range(5)]

    first = await plane.admission.issue_many(tasks, limit=3)
    second = await plane.admission.issue(tasks[3], limit=3)

    assert first == IssueResult(IssueOutcome.BUDGET_FULL, 3, 3)
    assert second == IssueResult(IssueOutcome.BUDGET_FULL, 0, 3)
    assert (await ledger_of(plane)).outstanding == 3


async def test_a_repeated_issue_finds_the_cursor_moved(plane: DataPlane) -> None:
    first = await plane.admission.issue(a_task(0), limit=10)
    again = await plane.admission.issue(a_task(0), limit=10)

    assert first == IssueResult(IssueOutcome.ISSUED, 1, 1)
    assert again == IssueResult(IssueOutcome.CURSOR_MOVED, 0, 1)
    assert (await ledger_of(plane)).issued == 1
    assert await plane.admission.next_group_id() == 1


async def test_ids_that_run_ahead_are_refused(plane: DataPlane) -> None:
    assert (await plane.admission.issue(a_task(4), limit=10)).outcome is IssueOutcome.CURSOR_MOVED
    with pytest.raises(ValueError, match="consecutive"):
        await plane.admission.issue_many([a_task(0), a_task(2)], limit=10)
    assert await plane.admission.issue_many([], limit=10) == IssueResult(IssueOutcome.ISSUED, 0, 0)
    assert (await ledger_of(plane)).issued == 0


async def test_ids_begin_where_the_first_to_say_so_wants(plane: DataPlane) -> None:
    await plane.admission.begin_at(40)
    await plane.admission.begin_at(7)

    assert (await plane.admission.issue(a_task(0), limit=10)).outcome is IssueOutcome.CURSOR_MOVED
    assert await plane.admission.issue(a_task(40), limit=10) == IssueResult(IssueOutcome.ISSUED, 1, 41)
    await plane.admission.begin_at(40)
    assert await plane.admission.next_group_id() == 41
    ledger = await ledger_of(plane)
    assert (ledger.issued, ledger.outstanding, ledger.balanced) == (1, 1, True)


async def test_a_resolved_group_makes_room(plane: DataPlane) -> None:
    await plane.admission.issue(a_task(0), limit=1)
    rollout = plane.hop(HopName.TASKS, "rollout")
    (claim,) = await rollout.claim(wait_seconds=0)
    await rollout.resolve(claim, Resolution.FAILED, "timeout")

    assert (await plane.admission.issue(a_task(1), limit=1)).outcome is IssueOutcome.ISSUED


async def test_nothing_is_issued_while_a_stream_is_full(plane: DataPlane) -> None:
    await plane.admission.bound(200_000)
    await issue(plane, 3)
    rollout, reward = plane.hop(HopName.TASKS, "rollout"), plane.hop(HopName.GENERATED, "reward")
    for claim in await rollout.claim(3, wait_seconds=0):
        assert await rollout.forward(claim, a_group(claim.task(), sampled_tokens=5000))

    assert await plane.admission.issue(a_task(3), limit=100) == IssueResult(IssueOutcome.STREAM_FULL, 0, 3)
    for claim in await reward.claim(3, wait_seconds=0):
        assert await reward.resolve(claim, Resolution.FILTERED, "zero variance")

    assert (await plane.admission.issue(a_task(3), limit=100)).outcome is IssueOutcome.ISSUED


async def test_nothing_is_claimed_that_a_full_stream_would_have_to_take(plane: DataPlane) -> None:
    await plane.admission.bound(100_000)
    await issue(plane, 8)
    rollout, reward = plane.hop(HopName.TASKS, "rollout"), plane.hop(HopName.GENERATED, "reward")
    first = await rollout.claim(3, wait_seconds=0)
    for claim in first:
        assert await rollout.forward(claim, a_group(claim.task(), sampled_tokens=5000))

    # Another claimer, since this one may look only now and then.
    other = plane.hop(HopName.TASKS, "other")
    assert await other.claim(3, wait_seconds=0.05) == []
    sizes = await plane.admission.bound(100_000)
    assert sizes[HopName.GENERATED] > 100_000 and sizes[HopName.SCORED] == 0
    assert (await ledger_of(plane)).waiting.tasks == 5
    # What empties the stream goes on, and then what fills it.
    for claim in await reward.claim(3, wait_seconds=0):
        assert await reward.resolve(claim, Resolution.FILTERED, "zero variance")
    assert len(await other.claim(3, wait_seconds=2)) == 3
    assert (await ledger_of(plane)).balanced


async def test_the_oldest_entry_of_each_hop_tells_how_long_it_waits(world: World, plane: DataPlane) -> None:
    assert await plane.oldest_seconds() == {}
    await issue(plane, 2)
    await world.let_time_pass(AGE_SECONDS)
    await issue(plane, 1, first=2)

    seen_at = time.monotonic()  # before the server looks: what its answer takes must not count against the third's age
    waited = (await plane.oldest_seconds())[HopName.TASKS]
    assert waited + CLOCK_SECONDS >= AGE_SECONDS

    rollout, reward = plane.hop(HopName.TASKS, "rollout"), plane.hop(HopName.GENERATED, "reward")
    first, second = await rollout.claim(2, wait_seconds=0)
    assert (await plane.oldest_seconds())[HopName.TASKS] >= waited, "what is claimed waits on"
    assert await rollout.forward(first, a_group(first.task()))
    ages = await plane.oldest_seconds()
    assert ages[HopName.TASKS] >= waited
    later = ages[HopName.TASKS] - AGE_SECONDS + CLOCK_SECONDS
    assert ages[HopName.GENERATED] <= later, "a hop's age begins with the arrival there"

    assert await rollout.resolve(second, Resolution.FAILED, "timeout")
    [third] = await rollout.claim(1, wait_seconds=1)
    assert await rollout.hand_back(third)
    ages = await plane.oldest_seconds()
    age_of_the_first = waited + time.monotonic() - seen_at
    assert ages[HopName.TASKS] <= age_of_the_first - AGE_SECONDS + CLOCK_SECONDS, "the third came later"
    for claim in await reward.claim(1, wait_seconds=0):
        assert await reward.forward(claim, graded(claim.group(), [0.0, 1.0]))
    assert set(await plane.oldest_seconds()) == {HopName.TASKS, HopName.SCORED}
    trainer = await a_trainer(plane)
    assert await trainer.plan(1, await trainer.hop.claim(1, wait_seconds=0), version=0)
    assert set(await plane.oldest_seconds()) == {HopName.TASKS}, "a planned group waits for nobody"


async def test_a_lifted_bound_bounds_nothing(plane: DataPlane) -> None:
    await plane.admission.bound(1)
    await issue(plane, 0)
    assert (await plane.admission.issue(a_task(0), limit=9)).outcome is IssueOutcome.ISSUED
    assert (await plane.admission.issue(a_task(1), limit=9)).outcome is IssueOutcome.STREAM_FULL

    await plane.admission.bound(None)

    assert (await plane.admission.issue(a_task(1), limit=9)).outcome is IssueOutcome.ISSUED


async def test_a_planned_group_takes_room_until_the_next_publication(plane: DataPlane) -> None:
    await issue(plane, 2)
    await move_to_scored(plane, 2)
    trainer = await a_trainer(plane)
    assert await trainer.plan(1, await trainer.hop.claim(2, wait_seconds=0), version=0)

    assert (await plane.admission.issue(a_task(2), limit=2)).outcome is IssueOutcome.BUDGET_FULL
    assert (await ledger_of(plane)).consumed_since_publication == 2
    assert await plane.admission.published(1)

    assert (await ledger_of(plane)).consumed_since_publication == 0
    assert (await plane.admission.issue(a_task(2), limit=2)).outcome is IssueOutcome.ISSUED


async def test_what_was_planned_under_the_published_version_still_counts(plane: DataPlane) -> None:
    await issue(plane, 3)
    await move_to_scored(plane, 3)
    trainer = await a_trainer(plane)
    assert await trainer.plan(1, await trainer.hop.claim(2, wait_seconds=0), version=0)
    assert await trainer.plan(2, await trainer.hop.claim(1, wait_seconds=0), version=1)

    assert await plane.admission.published(1)

    assert (await ledger_of(plane)).consumed_since_publication == 1


async def test_only_newer_publications_count(plane: DataPlane) -> None:
    assert await plane.admission.published_version() is None
    assert await plane.admission.published(3)
    await issue(plane, 1)
    await move_to_scored(plane, 1)
    trainer = await a_trainer(plane)
    assert await trainer.plan(1, await trainer.hop.claim(1, wait_seconds=0), version=3)

    assert not await plane.admission.published(3)
    assert not await plane.admission.published(2)

    assert await plane.admission.published_version() == 3
    assert (await ledger_of(plane)).consumed_since_publication == 1


async def test_outstanding_groups_are_known_by_their_version(plane: DataPlane) -> None:
    await issue(plane, 2, version=0)
    await issue(plane, 2, first=2, version=3)
    await issue(plane, 9, first=4, version=5)

    assert await plane.admission.outstanding_older_than(3) == [0, 1]
    assert await plane.admission.outstanding_older_than(6) == list(range(13))
    queue = (await ledger_of(plane)).by_version
    assert [(each.version, each.groups, each.first_group) for each in queue] == [(0, 2, 0), (3, 2, 2), (5, 9, 4)]
    await move_to_scored(plane, 2)
    trainer = await a_trainer(plane)
    assert await trainer.plan(1, await trainer.hop.claim(2, wait_seconds=0), version=3)

    assert await plane.admission.outstanding_older_than(3) == []


async def test_groups_that_end_are_told_and_planned_ones_are_not(world: World, plane: DataPlane) -> None:
    told: asyncio.Queue[int] = asyncio.Queue()
    following = asyncio.create_task(plane.admission.follow_ends(told.put_nowait))
    assert await asyncio.wait_for(told.get(), 10) == 0, "from now on"
    trainer = await a_trainer(plane)
    await issue(plane, 4)
    await move_to_scored(plane, 3)
    await trainer.plan(1, await trainer.hop.claim(1, wait_seconds=1), 0)
    await plane.ledger()
    assert told.empty(), "neither forwards nor plans leave room"

    tasks = plane.hop(HopName.TASKS, "r")
    for hop, resolution, count in ((tasks, Resolution.FAILED, 1), (trainer.hop, Resolution.DROPPED, 2)):
        await hop.resolve_many(await hop.claim(count, wait_seconds=1), resolution, "test")
        assert sum([await asyncio.wait_for(told.get(), 10) for _ in range(1 if world.redis else count)]) == count

    if world.redis is not None:
        for said in (b"", b"many", b"-1", b"9" * 5000):
            await world.redis.publish(StreamKeys(world.experiment_id, Lane.TRAIN).ends, said)
            assert await asyncio.wait_for(told.get(), 10) == 0, "whoever may publish says anything"

    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following
