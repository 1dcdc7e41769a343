"""Planes on the run's server."""

import uuid
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from flotilla.shared.streams.hop import StreamsConfig
from flotilla.shared.streams.redis.connection import connect
from flotilla.shared.streams.redis.plane import RedisDataPlane


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(redis_url)
    try:
        yield client
    finally:
        await client.aclose()


@pytest.fixture
def experiment_id() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def plane(redis: Redis, experiment_id: str) -> RedisDataPlane:
    return RedisDataPlane(redis, experiment_id, config=StreamsConfig(lease_seconds=0.3))
