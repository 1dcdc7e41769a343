"""The two twins of the data plane, each behind the same small world, with the ledger checked after every call."""

import asyncio
import contextlib
import inspect
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from flotilla.shared.schemas.task import Lane
from flotilla.shared.streams.hop import CONSUMER_GROUP, Hop, HopName, StreamKeys, StreamsConfig
from flotilla.shared.streams.ledger import REASONED, Ledger
from flotilla.shared.streams.memory.plane import MemoryDataPlane
from flotilla.shared.streams.plane import DataPlane
from flotilla.shared.streams.plans import TrainerQueue
from flotilla.shared.streams.redis.connection import connect
from flotilla.shared.streams.redis.plane import RedisDataPlane
from flotilla.shared.testing.builders import a_group, a_task, graded
from tests.integration.conftest import redis_url
from tests.netns.fleet import shipped_users

__all__ = ["redis_url"]

LEASE_SECONDS = 60.0
"""Longer than any test: no lease ends but by ``let_leases_end``, however slow the machine is."""


class Checked:
    """Passes everything on, and asks the ledger after every call."""

    def __init__(self, target: Any, plane: DataPlane) -> None:
        self._target = target
        self._plane = plane

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if name in {"hop", "admission"} and not callable(found):
            return Checked(found, self._plane)
        if name in {"hop", "trainer"}:
            return lambda *args: Checked(found(*args), self._plane)
        if not inspect.iscoroutinefunction(found):
            return found

        async def checked(*args: Any, **named: Any) -> Any:
            try:
                return await found(*args, **named)
            finally:
                ledger = await self._plane.ledger()
                assert ledger.balanced, (name, ledger)
                assert lengths_add_up(ledger), (name, ledger)

        return checked


def lengths_add_up(ledger: Ledger) -> bool:
    """Whether the lengths of each reason count every group that ended for it, and nothing else."""
    counts = {kind: getattr(ledger, kind) for kind in REASONED if getattr(ledger, kind)}
    sums = {
        kind: {reason: sum(histogram.values()) for reason, histogram in reasons.items()}
        for kind, reasons in ledger.lengths.items()
    }
    return sums == counts


USERS = ("gateway", "rollout", "reward", "trainer")


class EachItsOwn:
    """A data plane whose parts are used as in a fleet: each by a service of its kind, under the user of that kind."""

    def __init__(self, planes: Mapping[str, RedisDataPlane]) -> None:
        # The evaluator, which reads the last hop of its lane, is the gateway's.
        self._readers = {HopName.TASKS: "rollout", HopName.GENERATED: "reward", HopName.SCORED: "gateway"}
        self._planes = planes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planes["gateway"], name)

    def hop(self, name: HopName, service_id: str) -> Hop:
        """Open a hop as its reader."""
        return self._planes[self._readers[name]].hop(name, service_id)

    def trainer(self, service_id: str) -> TrainerQueue:
        """Open the trainer's queue."""
        return self._planes["trainer"].trainer(service_id)


async def add_users(redis: Redis, url: str) -> dict[str, Redis]:
    """Make the users that are deployed, and a client of each."""
    clients = {}
    for line in shipped_users(dict.fromkeys(USERS, "secret")).splitlines():
        _, name, *rules = line.split()
        if name in USERS:
            await redis.execute_command("ACL", "SETUSER", name, "reset", *rules)
            parts = urlsplit(url)
            place = parts.netloc.rpartition("@")[2]
            clients[name] = connect(urlunsplit(parts._replace(netloc=f"{name}:secret@{place}")))
    return clients


@dataclass
class World:
    """A data plane, its clock, and the shortest ways to the states that tests start from."""

    kind: str
    redis: Redis | None
    users: Mapping[str, Redis] = field(default_factory=dict)
    seconds: float = 0.0
    experiment_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def open(self, lane: Lane = Lane.TRAIN, **config: Any) -> DataPlane:
        """Open the lane; both twins have a lease that ``let_leases_end`` ends."""
        settings = StreamsConfig(**({"lease_seconds": LEASE_SECONDS} | config))
        if self.redis is None:
            plane: Any = MemoryDataPlane(lane, settings, clock=lambda: self.seconds)
        else:
            planes = {
                kind: RedisDataPlane(client, self.experiment_id, lane, settings) for kind, client in self.users.items()
            }
            plane = EachItsOwn(planes)
        checked: Any = Checked(plane, plane)
        return checked

    async def let_leases_end(self) -> None:
        """Let all that is claimed now have been idle for more than one lease."""
        self.seconds += LEASE_SECONDS + 1
        if self.redis is None:
            return
        idle = {"min_idle_time": 0, "idle": round(1000 * (LEASE_SECONDS + 1)), "justid": True}
        for stream in [StreamKeys(self.experiment_id, lane).stream(hop) for lane in Lane for hop in HopName]:
            with contextlib.suppress(ResponseError):  # nobody has read it yet
                for entry in await self.redis.xpending_range(stream, CONSUMER_GROUP, "-", "+", 1000):
                    ids = [entry["message_id"]]
                    await self.redis.xclaim(stream, CONSUMER_GROUP, entry["consumer"], message_ids=ids, **idle)

    async def let_time_pass(self, seconds: float) -> None:
        """Let what is in a stream grow older."""
        self.seconds += seconds
        if self.redis is not None:
            await asyncio.sleep(seconds)


@pytest.fixture(params=["memory", "redis"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    if request.param == "memory":
        yield World("memory", None)
        return
    url = request.getfixturevalue("redis_url")
    redis = connect(url)
    users = await add_users(redis, url)
    try:
        yield World("redis", redis, users)
    finally:
        for client in (redis, *users.values()):
            await client.aclose()


@pytest.fixture
def plane(world: World) -> Iterator[DataPlane]:
    yield world.open()


async def issue(plane: DataPlane, count: int, *, first: int = 0, version: int = 0) -> None:
    """Issue tasks with these ids, whatever the budget."""
    tasks = [a_task(group_id, min_version=version) for group_id in range(first, first + count)]
    assert (await plane.admission.issue_many(tasks, limit=10**6)).count == count


async def move_to_scored(plane: DataPlane, count: int, *, version: int = 0) -> None:
    """Take ``count`` waiting tasks through rollout and reward."""
    rollout, reward = plane.hop(HopName.TASKS, "rollout"), plane.hop(HopName.GENERATED, "reward")
    for claim in await rollout.claim(count, wait_seconds=0):
        assert await rollout.forward(claim, a_group(claim.task(), version=version))
    for claim in await reward.claim(count, wait_seconds=0):
        assert await reward.forward(claim, graded(claim.group(), [0.0, 1.0]))


async def a_trainer(plane: DataPlane) -> TrainerQueue:
    """Open the trainer's queue and take over."""
    queue = plane.trainer("trainer")
    await queue.take_over()
    return queue


async def claim_ids(hop: Hop, count: int = 10, *, wait_seconds: float = 0) -> list[int]:
    """Claim, and list the group ids."""
    return [claim.header.group_id for claim in await hop.claim(count, wait_seconds=wait_seconds)]


async def ledger_of(plane: DataPlane) -> Ledger:
    """Take a balanced snapshot."""
    ledger = await plane.ledger()
    assert ledger.balanced, ledger
    return ledger
