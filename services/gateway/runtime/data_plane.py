"""Opens the data plane's server, and each experiment's part of it.

A gateway that has been deposed is kept from it: one that was stopped, and wakes, changes nothing there.
Each connection of a gateway with standbys has a name, and is used only once it has seen that its gateway leads. Who
takes over writes its own mark first, and then ends the connections of all others: what one of them sends afterwards
reaches nobody, and one that it makes again finds the other mark.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from flotilla.services.gateway.settings import GatewaySettings
from flotilla.shared.errors import FlotillaError, Unavailable
from flotilla.shared.schemas.task import Lane
from flotilla.shared.streams.hop import StreamsConfig
from flotilla.shared.streams.plane import DataPlane
from flotilla.shared.streams.redis.connection import answer_in_time, check_server, connect, unavailable
from flotilla.shared.streams.redis.plane import RedisDataPlane

log = logging.getLogger(__name__)


MARK: Final = "{exp::gateway}:leader"
"""Key of the mark; no experiment's id has a colon."""
NAME: Final = "flotilla-gateway"
CLAIM_SECONDS: Final = 10.0


class Fence:
    """Lets the connections of one client through while its gateway leads.

    Args:
        redis: the client, which has not connected yet.
        confirm: proves by the database that this gateway leads, or raises; a server that came back older, or empty,
            has another mark, or none.
        part: of the gateway, where it has several clients: each has its own mark.
    """

    def __init__(self, redis: Redis, confirm: Callable[[], Awaitable[None]], part: str = "") -> None:
        self._redis = redis
        self._key, self._name = f"{MARK}{part and f':{part}'}", f"{NAME}{part and f':{part}'}-"
        self._confirm = confirm
        self._mark = secrets.token_hex(8)
        self._has_claimed = False
        redis.connection_pool.connection_kwargs["redis_connect_func"] = self._let_through

    async def claim(self) -> None:
        """Take the data plane over, and shut all other gateways out.

        Raises:
            Unavailable: the server does not answer.
        """
        try:
            async with answer_in_time():
                await self._redis.set(self._key, self._mark)
                self._has_claimed = True
                await self._end_others()
        except (RedisError, OSError) as error:
            raise unavailable(error, CLAIM_SECONDS) from error

    async def _end_others(self) -> None:
        database = str(self._redis.connection_pool.connection_kwargs.get("db", 0))
        for each in await self._redis.client_list():
            name = each.get("name", "")
            if name.startswith(self._name) and name != self._name + self._mark and each.get("db") == database:
                log.warning("a connection of another gateway is ended", extra={"address": each.get("addr")})
                await self._redis.client_kill_filter(_id=each["id"])

    async def _let_through(self, connection: Any) -> None:
        await connection.on_connect()
        await _ask(connection, "CLIENT", "SETNAME", self._name + self._mark)
        if not self._has_claimed:
            return
        found = await _ask(connection, "GET", self._key)
        if found == self._mark.encode():
            return
        try:
            await self._confirm()
        except FlotillaError as error:
            raise RedisConnectionError(f"this gateway does not lead: {error.detail}") from error
        await _ask(connection, "SET", self._key, self._mark)


async def _ask(connection: Any, *words: str) -> Any:
    await connection.send_command(*words)
    return await connection.read_response()


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
