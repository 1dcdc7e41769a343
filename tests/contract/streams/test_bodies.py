"""Groups small and large, changed and only graded: what arrives is whole, however it was sent."""

from collections.abc import Callable
from dataclasses import replace

import msgpack
import numpy as np
import pytest

from flotilla.shared.schemas.trajectory import FinishReason, GradeStatus, Group, Trajectory
from flotilla.shared.streams.hop import Claim, Hop, HopName, Resolution, forwarded
from flotilla.shared.streams.plane import DataPlane
from flotilla.shared.streams.redis.hop import APPENDED_BYTES
from flotilla.shared.testing.builders import a_group, a_task, graded
from tests.contract.streams.conftest import World, a_trainer, claim_ids, issue, ledger_of

SMALL, LARGE = 5, 8000
"""Sampled tokens of each of two trajectories: below and above the size from which a command of its own appends."""


@pytest.fixture(params=[SMALL, LARGE])
def tokens(request: pytest.FixtureRequest) -> int:
    chosen: int = request.param
    return chosen


async def generated(plane: DataPlane, *tokens: int) -> list[Group]:
    """Issue a task for each number and answer it with a group of such trajectories."""
    await issue(plane, len(tokens))
    rollout = plane.hop(HopName.TASKS, "rollout")
    groups = []
    for claim, number in zip(await rollout.claim(len(tokens), wait_seconds=0), tokens, strict=True):
        groups.append(a_group(claim.task(), sampled_tokens=number))
        assert await rollout.forward(claim, groups[-1])
    return groups


async def one(hop: Hop) -> Claim:
    (claim,) = await hop.claim(1, wait_seconds=1)
    return claim


def masked(group: Group) -> Group:
    """Leave the first trajectory out of the loss, as the reward service's sample mask does."""
    first, *others = group.trajectories
    left_out = replace(first, loss_mask=np.zeros_like(first.loss_mask), log_probs=np.zeros_like(first.log_probs))
    return replace(group, trajectories=(left_out, *others))


def assert_same(arrived: Group, sent: Group) -> None:
    assert arrived.body_to_wire() == sent.body_to_wire()
    assert arrived.grades_to_wire() == sent.grades_to_wire()


async def test_a_group_that_was_graded_arrives_whole_and_its_header_says_so(plane: DataPlane, tokens: int) -> None:
    (sent,) = await generated(plane, tokens)
    reward, trainer = plane.hop(HopName.GENERATED, "reward"), await a_trainer(plane)
    claim = await one(reward)
    first, second = claim.group().trajectories
    judged = (
        first.graded(GradeStatus.SCORED, 0.75, components={"format": 1.0}, timings={"grading_seconds": 2.0}),
        second.graded(GradeStatus.ERROR, None, reason="the grader is unavailable"),
    )

    assert await reward.forward(claim, replace(claim.group(), trajectories=judged))

    scored = await one(trainer.hop)
    assert (len(scored.payload) >= APPENDED_BYTES) == (tokens == LARGE)
    assert scored.payload == claim.payload
    assert_same(scored.group(), replace(sent, trajectories=judged))
    assert (scored.header.reward_mean, scored.header.reward_spread) == (0.75, 0.0)
    for name in ("schema", "group_id", "size", "token_count", "oldest_version", "newest_version"):
        assert getattr(scored.header, name) == getattr(claim.header, name)
    ledger = await ledger_of(plane)
    assert (ledger.tokens.scored, ledger.claimed.scored, ledger.claimed.generated) == (sent.num_sampled, 1, 0)


async def test_a_group_whose_body_was_changed_arrives_changed(plane: DataPlane, tokens: int) -> None:
    await generated(plane, tokens)
    reward, trainer = plane.hop(HopName.GENERATED, "reward"), await a_trainer(plane)
    claim = await one(reward)
    changed = masked(graded(claim.group(), [0.0, 1.0]))

    assert await reward.forward(claim, changed)

    scored = await one(trainer.hop)
    assert_same(scored.group(), changed)
    assert scored.header.token_count == changed.num_sampled == tokens


async def test_a_planned_group_is_replayed_with_its_grades(plane: DataPlane, tokens: int) -> None:
    await generated(plane, tokens)
    reward, trainer = plane.hop(HopName.GENERATED, "reward"), await a_trainer(plane)
    claim = await one(reward)
    sent = graded(claim.group(), [0.25, 1.0])
    assert await reward.forward(claim, sent)
    assert await trainer.plan(1, [await one(trainer.hop)], version=0)

    (replayed,) = await (await a_trainer(plane)).replay(1)

    assert_same(replayed.group(), sent)


async def test_a_repeated_forward_has_one_effect(plane: DataPlane, tokens: int) -> None:
    await generated(plane, tokens)
    reward, trainer = plane.hop(HopName.GENERATED, "reward"), await a_trainer(plane)
    claim = await one(reward)
    sent = graded(claim.group(), [0.0, 1.0])

    answers = [await reward.forward(claim, sent) for _ in range(3)]

    assert answers == [True] * 3
    assert (await ledger_of(plane)).waiting.scored == 1
    assert_same((await one(trainer.hop)).group(), sent)


async def test_a_claim_that_was_taken_over_appends_nothing(world: World, plane: DataPlane, tokens: int) -> None:
    await generated(plane, tokens)
    slow, quick = plane.hop(HopName.GENERATED, "slow"), plane.hop(HopName.GENERATED, "quick")
    lost = await one(slow)
    await world.let_leases_end()
    taken = await one(quick)

    assert not await slow.forward(lost, graded(lost.group(), [0.0, 1.0]))
    assert (await ledger_of(plane)).waiting.scored == 0
    assert await quick.forward(taken, graded(taken.group(), [1.0, 1.0]))
    assert not await slow.forward(lost, graded(lost.group(), [0.0, 1.0]))

    scored = await one((await a_trainer(plane)).hop)
    assert (scored.group().rewards(), scored.header.reward_mean) == ([1.0, 1.0], 1.0)


async def test_a_group_that_was_given_up_is_not_forwarded(world: World, tokens: int) -> None:
    plane = world.open(max_deliveries=1)
    await generated(plane, tokens)
    reward = plane.hop(HopName.GENERATED, "reward")
    lost = await one(reward)
    await world.let_leases_end()
    assert await claim_ids(reward, wait_seconds=1) == []

    assert not await reward.forward(lost, graded(lost.group(), [0.0, 1.0]))

    ledger = await ledger_of(plane)
    assert (ledger.failed, ledger.waiting.scored, ledger.outstanding) == ({"too_many_deliveries": 1}, 0, 0)


async def test_many_at_once_are_forwarded_or_lost_each_for_itself(plane: DataPlane) -> None:
    await generated(plane, SMALL, LARGE, LARGE, LARGE, SMALL)
    reward, trainer = plane.hop(HopName.GENERATED, "reward"), await a_trainer(plane)
    claims = await reward.claim(5, wait_seconds=0)
    sent = {claim.header.group_id: graded(claim.group(), [0.0, claim.header.group_id]) for claim in claims}
    sent[2] = masked(sent[2])
    assert await reward.resolve(claims[3], Resolution.FILTERED, "flat")

    done = await reward.forward_many([(claim, sent[claim.header.group_id]) for claim in [*claims, claims[1]]])

    assert done == [True, True, True, False, True, True]
    arrived = {claim.header.group_id: claim.group() for claim in await trainer.hop.claim(9, wait_seconds=0)}
    assert sorted(arrived) == [0, 1, 2, 4]
    for group_id, group in arrived.items():
        assert_same(group, sent[group_id])


async def test_a_group_without_grades_travels_too(plane: DataPlane, tokens: int) -> None:
    (sent,) = await generated(plane, tokens)
    reward, trainer = plane.hop(HopName.GENERATED, "reward"), await a_trainer(plane)
    claim = await one(reward)

    assert await reward.forward(claim, claim.group())

    assert_same((await one(trainer.hop)).group(), sent)


CHANGES: dict[str, Callable[[Group], Group]] = {
    "task": lambda group: replace(group, task=a_task(0, label="another")),
    "prompt": lambda group: replace(group, prompt="another"),
    "one fewer": lambda group: replace(group, trajectories=group.trajectories[:1]),
    "another order": lambda group: replace(group, trajectories=group.trajectories[::-1]),
    "equal arrays that are others": lambda group: with_first(group, token_ids=group.trajectories[0].token_ids.copy()),
    "mask": masked,
    "log-probabilities": lambda group: with_first(group, log_probs=group.trajectories[0].log_probs * 2),
    "versions": lambda group: with_first(group, versions=((0, 7),)),
    "finish reason": lambda group: with_first(group, finish_reason=FinishReason.LENGTH),
    "text": lambda group: with_first(group, text="another"),
    "resumed tokens": lambda group: with_first(group, resumed_tokens=2),
}


def with_first(group: Group, **fields: object) -> Group:
    first: Trajectory = replace(group.trajectories[0], **fields)  # type: ignore[arg-type]
    return replace(group, trajectories=(first, *group.trajectories[1:]))


@pytest.mark.parametrize("change", CHANGES)
async def test_anything_but_another_grade_is_a_change_of_the_body(plane: DataPlane, change: str) -> None:
    await generated(plane, LARGE)
    reward, trainer = plane.hop(HopName.GENERATED, "reward"), await a_trainer(plane)
    claim = await one(reward)
    assert forwarded(claim, graded(claim.group(), [0.0, 1.0]), claim.hop).body is claim.payload
    changed = CHANGES[change](graded(claim.group(), [0.0, 1.0]))

    assert forwarded(claim, changed, claim.hop).body is not None
    assert await reward.forward(claim, changed)

    assert_same((await one(trainer.hop)).group(), changed)


async def test_what_was_decoded_cannot_be_changed_in_place(plane: DataPlane) -> None:
    await generated(plane, SMALL)
    (trajectory, _) = (await one(plane.hop(HopName.GENERATED, "reward"))).group().trajectories

    for array in (trajectory.token_ids, trajectory.loss_mask, trajectory.log_probs):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


async def test_a_group_of_another_schema_is_refused_and_can_be_resolved(
    plane: DataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_before(group: Group) -> dict[str, object]:
        trajectories = [each.to_wire() for each in group.trajectories]
        return {"schema": 1, "task": group.task.to_wire(), "prompt": group.prompt, "trajectories": trajectories}

    with monkeypatch.context() as earlier:
        earlier.setattr("flotilla.shared.streams.hop.encode_body", lambda group: msgpack.packb(as_before(group)))
        earlier.setattr("flotilla.shared.streams.hop.encode_grades", lambda group: b"")
        await generated(plane, SMALL)
    reward = plane.hop(HopName.GENERATED, "reward")
    claim = await one(reward)

    with pytest.raises(ValueError, match=r"group has schema 1, this version reads 2"):
        claim.group()

    assert await reward.resolve(claim, Resolution.FAILED, "unreadable")
    assert (await ledger_of(plane)).failed == {"unreadable": 1}
