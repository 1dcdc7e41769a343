"""A forward that took effect is known as that however long its answer was missing; answered ones cost no memory."""

import pytest
from redis.asyncio import Redis

from flotilla.shared.streams.hop import HopName, StreamKeys
from flotilla.shared.streams.redis import hop
from flotilla.shared.streams.redis.connection import connect
from flotilla.shared.streams.redis.plane import RedisDataPlane
from flotilla.shared.testing.builders import a_group
from tests.contract.streams.conftest import issue

PARTITION_SECONDS = 3600


async def let_pass(redis: Redis, seconds: int, prefix: str) -> None:
    """Let what expires under a prefix have so much less time."""
    async for key in redis.scan_iter(f"{prefix}:*"):
        left = await redis.pttl(key)
        if left >= 0:
            await redis.pexpire(key, left - 1000 * seconds)


async def test_a_forward_repeated_after_an_hour_of_partition_is_no_lost_claim(
    redis_url: str, experiment_id: str, plane: RedisDataPlane
) -> None:
    redis = connect(redis_url)
    await issue(plane, 1)
    rollout = plane.hop(HopName.TASKS, "rollout")
    (claim,) = await rollout.claim(wait_seconds=0)
    assert await rollout.forward(claim, a_group(claim.task()))

    await let_pass(redis, PARTITION_SECONDS, StreamKeys(experiment_id).prefix)

    assert await rollout.forward(claim, a_group(claim.task()))
    await redis.aclose()


async def test_markers_of_answered_claims_are_forgotten(
    redis_url: str, experiment_id: str, plane: RedisDataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hop, "ANSWERED_SECONDS", 0.0)
    redis = connect(redis_url)
    await issue(plane, 5)
    rollout = plane.hop(HopName.TASKS, "rollout")
    for claim in await rollout.claim(5, wait_seconds=0):
        assert await rollout.forward(claim, a_group(claim.task()))

    markers = [key async for key in redis.scan_iter(StreamKeys(experiment_id).marker("*"))]

    assert len(markers) == 1
    await redis.aclose()
