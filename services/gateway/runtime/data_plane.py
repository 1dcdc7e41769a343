"""Opens the data plane's server, and each experiment's part of it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from redis.asyncio import Redis

from flotilla.services.gateway.runtime.fencing import Fence
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.shared.errors import FlotillaError, Unavailable
from flotilla.shared.schemas.task import Lane
from flotilla.shared.streams.hop import StreamsConfig
from flotilla.shared.streams.plane import DataPlane
from flotilla.shared.streams.redis.connection import check_server, connect
from flotilla.shared.streams.redis.plane import RedisDataPlane

log = logging.getLogger(__name__)

DEADLINE_SECONDS = 5.0
READY_SECONDS = 3.0


class RedisPlanes:
    """The data planes of all experiments, on one Redis server."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    def open(self, experiment_id: str, lane: Lane, *, lease_seconds: float | None = None) -> DataPlane:
        """Open one lane of an experiment's data plane."""
        config = StreamsConfig(deadline_seconds=DEADLINE_SECONDS)
        if lease_seconds is not None:
            config = config.model_copy(update={"lease_seconds": lease_seconds})
        return RedisDataPlane(self._redis, experiment_id, lane, config)

    async def ping(self) -> None:
        """Prove that the server answers.

        Raises:
            Unavailable: it does not.
        """
        try:
            await self._redis.ping()
        except Exception as error:
            raise Unavailable(f"the Redis server does not answer: {error}") from error


@asynccontextmanager
async def open_data_plane(
    settings: GatewaySettings, confirm: Callable[[], Awaitable[None]]
) -> AsyncIterator[RedisPlanes]:
    """Connect to the data plane's server, once it is seen to be one that may be used.

    Args:
        settings: with its address.
        confirm: proves that this gateway leads, or raises.

    Raises:
        Unavailable: it does not answer.
    """
    server = await check_server(settings.redis_url, may_be_volatile=settings.allow_volatile_redis)
    log.info("data plane answers", extra={"server": server})
    redis = connect(settings.redis_url)
    try:
        if settings.has_standbys:
            await Fence(redis, confirm).claim()
        yield RedisPlanes(redis)
    finally:
        await redis.aclose()


async def why_no_answer(*pings: Callable[[], Awaitable[None]]) -> str | None:
    """Name which of the database and the data plane does not answer; None if both do."""
    try:
        async with asyncio.timeout(READY_SECONDS):
            for ping in pings:
                await ping()
    except FlotillaError as error:
        return error.detail
    except TimeoutError:
        return f"the database or the data plane did not answer within {READY_SECONDS:g} s"
    return None
