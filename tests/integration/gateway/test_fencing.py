"""Connections of a gateway that has been deposed reach the data plane no more, those that it had and new ones."""

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from flotilla.services.gateway.runtime.data_plane import MARK, Fence
from flotilla.shared.errors import NotLeading
from flotilla.shared.streams.redis.connection import connect


class Place:
    """Whether a gateway leads, as its database says."""

    def __init__(self) -> None:
        self.is_ours = True

    async def confirm(self) -> None:
        if not self.is_ours:
            raise NotLeading("deposed")


async def a_gateway(url: str, part: str = "") -> tuple[Redis, Place]:
    redis, place = connect(url), Place()
    await Fence(redis, place.confirm, part).claim()
    return redis, place


async def test_a_deposed_gateway_changes_nothing_in_the_data_plane(redis_url: str) -> None:
    bystander = connect(redis_url)
    await bystander.set("bystander", 1)
    first, place = await a_gateway(redis_url)
    await first.set("fenced", "first")

    second, _ = await a_gateway(redis_url)
    place.is_ours = False
    for _ in range(3):
        with pytest.raises(RedisConnectionError):
            await first.set("fenced", "first again")
    await second.append("fenced", " second")

    assert await bystander.get("fenced") == b"first second"
    for each in (first, second, bystander):
        await each.aclose()


async def test_a_gateway_that_leads_goes_on_when_the_server_has_lost_its_mark(redis_url: str) -> None:
    redis, _ = await a_gateway(redis_url)
    mark = await redis.get(MARK)
    await redis.set(MARK, "of an earlier state")
    await redis.connection_pool.disconnect()

    await redis.set("fenced", "after")

    assert (await redis.get(MARK), await redis.get("fenced")) == (mark, b"after")
    await redis.aclose()


async def test_clients_of_one_gateway_do_not_shut_each_other_out(redis_url: str) -> None:
    one, _ = await a_gateway(redis_url)
    other, place = await a_gateway(redis_url, "tinker")
    await one.set("fenced", "one")
    await other.append("fenced", " other")

    replacing, _ = await a_gateway(redis_url, "tinker")
    place.is_ours = False

    with pytest.raises(RedisConnectionError):
        await other.set("fenced", "other again")
    await one.append("fenced", " one again")
    assert await replacing.get("fenced") == b"one other one again"
    for each in (one, other, replacing):
        await each.aclose()
