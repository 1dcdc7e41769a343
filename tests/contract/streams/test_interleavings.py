"""Whatever the order of events: the ledger balances, nothing has effect twice, nothing is lost."""

import asyncio
import time
import uuid

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from flotilla.shared.streams.hop import StreamsConfig
from flotilla.shared.streams.memory.plane import MemoryDataPlane
from flotilla.shared.streams.redis.connection import connect
from flotilla.shared.streams.redis.plane import RedisDataPlane
from tests.contract.streams.machine import Fleet, Rig

CHECKS = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}


class Clock:
    """Stands still unless it is moved."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def move(self) -> None:
        self.seconds += 100


def in_memory() -> Rig:
    clock = Clock()
    plane = MemoryDataPlane(config=StreamsConfig(lease_seconds=60, max_deliveries=3), clock=clock)
    return Rig(asyncio.Runner(), plane, clock.move, lambda: None)


def test_memory() -> None:
    fleet = lambda: Fleet(in_memory, drain_seconds=0)  # noqa: E731
    run_state_machine_as_test(fleet, settings=settings(max_examples=80, stateful_step_count=40, **CHECKS))


@pytest.mark.slow
def test_redis(redis_url: str) -> None:
    def on_redis() -> Rig:
        runner = asyncio.Runner()
        client = connect(redis_url)
        config = StreamsConfig(lease_seconds=0.015, max_deliveries=3)
        plane = RedisDataPlane(client, uuid.uuid4().hex, config=config)
        return Rig(runner, plane, lambda: time.sleep(0.02), lambda: runner.run(client.aclose()))

    fleet = lambda: Fleet(on_redis, drain_seconds=0.015)  # noqa: E731
    run_state_machine_as_test(fleet, settings=settings(max_examples=25, stateful_step_count=40, **CHECKS))
