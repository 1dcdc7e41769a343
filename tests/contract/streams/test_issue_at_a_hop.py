"""Finished groups are issued where they belong: the same cursor, ledger, plans and replay as for tasks."""

import pytest

from flotilla.shared.schemas.trajectory import NO_VERSION, Group
from flotilla.shared.streams.admission import IssueOutcome, IssueResult
from flotilla.shared.streams.hop import HopName
from flotilla.shared.streams.plane import DataPlane
from flotilla.shared.testing.builders import a_group, a_task
from tests.contract.streams.conftest import a_trainer, issue, ledger_of


def finished(group_id: int, sampled_tokens: int = 5) -> Group:
    return a_group(a_task(group_id), rewards=[1.0, 0.0], version=NO_VERSION, sampled_tokens=sampled_tokens)


async def test_a_finished_group_is_planned_replayed_and_committed(plane: DataPlane) -> None:
    groups = [finished(0), finished(1)]

    assert await plane.admission.issue_groups(groups, hop=HopName.SCORED, limit=8) == IssueResult(
        IssueOutcome.ISSUED, 2, 2
    )

    ledger = await ledger_of(plane)
    assert (ledger.issued, ledger.waiting.scored, ledger.outstanding, ledger.tokens.scored) == (2, 2, 2, 20)
    first = await a_trainer(plane)
    claims = await first.hop.claim(2, wait_seconds=0)
    assert [claim.header.oldest_version for claim in claims] == [NO_VERSION, NO_VERSION]
    assert await first.plan(1, claims, version=0)
    trainer = await a_trainer(plane)
    replayed = [claim.group() for claim in await trainer.replay(1)]
    assert [group.task.group_id for group in replayed] == [0, 1]
    assert [group.rewards() for group in replayed] == [[1.0, 0.0], [1.0, 0.0]]
    assert all(
        (found.token_ids == made.token_ids).all()
        for group, whole in zip(replayed, groups, strict=True)
        for found, made in zip(group.trajectories, whole.trajectories, strict=True)
    )
    assert await trainer.commit([1]) == 1
    assert (await ledger_of(plane)).trained == 2


async def test_a_group_that_is_to_be_graded_is_issued_to_the_graders(plane: DataPlane) -> None:
    await plane.admission.issue_groups([a_group(0)], hop=HopName.GENERATED, limit=1)

    reward = plane.hop(HopName.GENERATED, "reward")
    [claim] = await reward.claim(1, wait_seconds=0)
    assert await reward.forward(claim, finished(0))

    ledger = await ledger_of(plane)
    assert (ledger.waiting.scored, ledger.tokens.generated, ledger.tokens.scored) == (1, 10, 10)


async def test_the_limit_bounds_what_is_outstanding_and_not_what_was_consumed(plane: DataPlane) -> None:
    admission = plane.admission
    groups = [finished(number) for number in range(5)]
    assert await admission.issue_groups(groups[:3], hop=HopName.SCORED, limit=2) == IssueResult(
        IssueOutcome.BUDGET_FULL, 2, 2
    )
    trainer = await a_trainer(plane)
    assert await trainer.plan(1, await trainer.hop.claim(2, wait_seconds=0), version=0)

    # No publication follows: a task would find the budget full.
    assert (await admission.issue(a_task(2), limit=2)).outcome is IssueOutcome.BUDGET_FULL
    assert (await admission.issue_groups(groups[2:4], hop=HopName.SCORED, limit=2)).count == 2


async def test_tasks_and_groups_have_one_cursor(plane: DataPlane) -> None:
    await issue(plane, 1)
    assert await plane.admission.issue_groups([finished(0)], hop=HopName.SCORED, limit=9) == IssueResult(
        IssueOutcome.CURSOR_MOVED, 0, 1
    )

    await plane.admission.issue_groups([finished(1)], hop=HopName.SCORED, limit=9)

    assert (await plane.admission.issue_groups([finished(1)], hop=HopName.SCORED, limit=9)).count == 0
    assert await plane.admission.issue(a_task(2), limit=9) == IssueResult(IssueOutcome.ISSUED, 1, 3)
    ledger = await ledger_of(plane)
    assert (ledger.waiting.tasks, ledger.waiting.scored, ledger.issued) == (2, 1, 3)


async def test_nothing_is_issued_into_a_full_stream(plane: DataPlane) -> None:
    await plane.admission.bound(100_000)
    await plane.admission.issue_groups([finished(0, sampled_tokens=9000)], hop=HopName.SCORED, limit=9)

    assert await plane.admission.issue_groups([finished(1)], hop=HopName.SCORED, limit=9) == IssueResult(
        IssueOutcome.STREAM_FULL, 0, 1
    )


async def test_what_does_not_belong_at_a_hop_is_refused(plane: DataPlane) -> None:
    with pytest.raises(ValueError, match="a grade"):
        await plane.admission.issue_groups([a_group(0)], hop=HopName.SCORED, limit=9)
    with pytest.raises(ValueError, match="are no tasks"):
        await plane.admission.issue_groups([finished(0)], hop=HopName.TASKS, limit=9)
    with pytest.raises(ValueError, match="consecutive"):
        await plane.admission.issue_groups([finished(0), finished(2)], hop=HopName.SCORED, limit=9)
    assert await plane.admission.issue_groups([], hop=HopName.SCORED, limit=9) == IssueResult(IssueOutcome.ISSUED, 0, 0)
    assert (await ledger_of(plane)).issued == 0
