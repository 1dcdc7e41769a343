"""What an operator or a restart may do to the server's state."""

import asyncio

import pytest
from redis.asyncio import Redis

from flotilla.shared.errors import Unavailable
from flotilla.shared.streams.hop import CONSUMER_GROUP, HopName, Resolution, StreamKeys, StreamsConfig
from flotilla.shared.streams.redis.hop import MARKER_SECONDS
from flotilla.shared.streams.redis.plane import RedisDataPlane
from flotilla.shared.testing.builders import a_group, graded
from tests.contract.streams.conftest import a_trainer, claim_ids, issue, ledger_of, move_to_scored

SIZES = (5, 20_000)
"""Sampled tokens of each of two trajectories: a script forwards the first, a transaction the second."""


async def test_a_missing_group_is_made_from_the_beginning(
    redis: Redis, plane: RedisDataPlane, experiment_id: str
) -> None:
    await issue(plane, 3)
    rollout = plane.hop(HopName.TASKS, "rollout")
    (lost,) = await rollout.claim(wait_seconds=0)
    await redis.xgroup_destroy(StreamKeys(experiment_id).stream(HopName.TASKS), CONSUMER_GROUP)

    assert (await ledger_of(plane)).waiting.tasks == 3
    assert await rollout.renew([lost]) == [lost]
    assert not await rollout.forward(lost, a_group(lost.task()))
    assert not await rollout.hand_back(lost)
    assert await claim_ids(rollout, wait_seconds=1) == [0, 1, 2]
    await ledger_of(plane)


async def test_a_missing_group_does_not_deliver_planned_groups_again(
    redis: Redis, plane: RedisDataPlane, experiment_id: str
) -> None:
    await issue(plane, 100)
    await move_to_scored(plane, 100)
    trainer = await a_trainer(plane)
    claims = await trainer.hop.claim(80, wait_seconds=0)
    assert await trainer.plan(1, claims[10:80], version=0)
    await redis.xgroup_destroy(StreamKeys(experiment_id).stream(HopName.SCORED), CONSUMER_GROUP)
    assert (await ledger_of(plane)).planned == 70

    held: list[int] = []
    async with asyncio.timeout(10):
        while len(held) < 30:
            held += await claim_ids(trainer.hop, 100, wait_seconds=1)

    assert sorted(held) == [*range(10), *range(80, 100)]
    assert await claim_ids(trainer.hop) == []
    await ledger_of(plane)
    assert [claim.header.group_id for claim in await trainer.replay(1)] == list(range(10, 80))
    assert await trainer.commit([1]) == 1
    ledger = await ledger_of(plane)
    assert (ledger.trained, ledger.claimed.scored) == (70, 30)


async def test_a_group_that_is_not_outstanding_is_never_planned(
    redis: Redis, plane: RedisDataPlane, experiment_id: str
) -> None:
    await issue(plane, 1)
    await move_to_scored(plane, 1)
    trainer = await a_trainer(plane)
    claims = await trainer.hop.claim(wait_seconds=0)
    await redis.zrem(StreamKeys(experiment_id).outstanding, "0")

    assert not await trainer.plan(1, claims, version=0)
    assert not (await plane.ledger()).balanced


async def generated(plane: RedisDataPlane, *, sampled_tokens: int) -> None:
    await issue(plane, 1)
    rollout = plane.hop(HopName.TASKS, "rollout")
    (claim,) = await rollout.claim(wait_seconds=0)
    assert await rollout.forward(claim, a_group(claim.task(), sampled_tokens=sampled_tokens))


async def test_a_large_payload_passes_no_script(redis: Redis, plane: RedisDataPlane) -> None:
    await generated(plane, sampled_tokens=50_000)
    reward = plane.hop(HopName.GENERATED, "reward")
    (claim,) = await reward.claim(wait_seconds=0)
    await redis.config_resetstat()

    assert await reward.forward(claim, graded(claim.group(), [0.0, 1.0]))

    calls = {name: facts["calls"] for name, facts in (await redis.info("commandstats")).items()}
    assert len(claim.payload) > 800_000
    # One for the transaction, none of the script's own.
    assert (calls["cmdstat_xadd"], calls["cmdstat_exec"], calls["cmdstat_eval"]) == (1, 1, 1)
    assert "cmdstat_xrange" not in calls


@pytest.mark.parametrize("sampled_tokens", SIZES)
async def test_an_entry_deleted_by_hand_goes_on_with_who_has_it(
    redis: Redis, plane: RedisDataPlane, experiment_id: str, sampled_tokens: int
) -> None:
    await generated(plane, sampled_tokens=sampled_tokens)
    reward = plane.hop(HopName.GENERATED, "reward")
    (claim,) = await reward.claim(wait_seconds=0)
    await redis.xdel(StreamKeys(experiment_id).stream(HopName.GENERATED), claim.entry_id)

    assert await reward.forward(claim, graded(claim.group(), [0.0, 1.0]))

    assert await redis.xlen(StreamKeys(experiment_id).stream(HopName.SCORED)) == 1
    assert (await ledger_of(plane)).claimed.generated == 0


@pytest.mark.parametrize("sampled_tokens", SIZES)
async def test_scripts_that_the_server_forgot_are_sent_again(
    redis: Redis, plane: RedisDataPlane, sampled_tokens: int
) -> None:
    await issue(plane, 2)
    rollout = plane.hop(HopName.TASKS, "rollout")
    claims = await rollout.claim(2, wait_seconds=0)
    await redis.script_flush()

    groups = [a_group(claim.task(), sampled_tokens=sampled_tokens) for claim in claims]
    assert await rollout.forward_many(list(zip(claims, groups, strict=True))) == [True, True]
    await redis.script_flush()
    assert await rollout.renew(claims) == claims
    assert (await ledger_of(plane)).waiting.generated == 2


async def test_nothing_but_the_streams_grows_with_the_groups(
    redis: Redis, plane: RedisDataPlane, experiment_id: str
) -> None:
    await issue(plane, 20)
    await move_to_scored(plane, 20)
    trainer = await a_trainer(plane)
    assert await trainer.plan(1, await trainer.hop.claim(20, wait_seconds=0), version=0)
    await trainer.commit([1])
    keys = StreamKeys(experiment_id)

    assert [await redis.xlen(keys.stream(hop)) for hop in HopName] == [0, 0, 0]
    assert await redis.zcard(keys.outstanding) == 0
    left = {key.decode() async for key in redis.scan_iter(f"{keys.prefix}:*")} - set(keys.all())
    assert all(":done:" in key for key in left)
    assert all([0 < await redis.pttl(key) <= MARKER_SECONDS * 1000 for key in left])


@pytest.mark.parametrize("sampled_tokens", SIZES)
async def test_a_full_server_refuses_new_work_and_lets_work_end(
    redis: Redis, plane: RedisDataPlane, experiment_id: str, sampled_tokens: int
) -> None:
    await issue(plane, 2)
    impatient = RedisDataPlane(redis, experiment_id, config=StreamsConfig(deadline_seconds=0.2))
    rollout = impatient.hop(HopName.TASKS, "rollout")
    one, other = await rollout.claim(2, wait_seconds=0)
    await redis.config_set("maxmemory", 1)
    try:
        with pytest.raises(Unavailable, match="memory"):
            await issue(impatient, 1, first=2)
        with pytest.raises(Unavailable, match="memory"):
            await rollout.forward(one, a_group(one.task(), sampled_tokens=sampled_tokens))
        assert await rollout.resolve(other, Resolution.FAILED, "timeout")
    finally:
        await redis.config_set("maxmemory", 0)

    assert await rollout.forward(one, a_group(one.task(), sampled_tokens=sampled_tokens))
    ledger = await ledger_of(plane)
    assert (ledger.issued, ledger.failed, ledger.waiting.generated) == (2, {"timeout": 1}, 1)


async def test_consumers_that_are_gone_are_forgotten_and_those_that_hold_something_are_not(
    redis: Redis, plane: RedisDataPlane, experiment_id: str
) -> None:
    await issue(plane, 3)
    stream = StreamKeys(experiment_id).stream(HopName.TASKS)
    gone, holder, back = (plane.hop(HopName.TASKS, name) for name in ("gone", "holder", "back"))
    (done,) = await gone.claim(wait_seconds=0)
    await gone.resolve(done, Resolution.FAILED, "timeout")
    (held,) = await holder.claim(wait_seconds=0)
    (returned,) = await back.claim(wait_seconds=0)
    assert await back.hand_back(returned)

    assert await plane.admission.forget_consumers(60) == 0, "they spoke a moment ago"
    await asyncio.sleep(0.02)
    assert await plane.admission.forget_consumers(0.01) == 2

    names = {consumer["name"].decode() for consumer in await redis.xinfo_consumers(stream, CONSUMER_GROUP)}
    assert names == {holder.consumer, "handed-back"}
    # A consumer that speaks again is created again.
    assert await claim_ids(gone, wait_seconds=1) == [returned.header.group_id]
    assert await holder.renew([held]) == []
    await ledger_of(plane)
