"""The store in memory: what reading it costs."""

import time

from flotilla.services.gateway.store.memory import MemoryStore
from flotilla.services.gateway.store.writes import PointRecord

NUM_POINTS = 20_000


async def test_reading_page_by_page_costs_as_much_as_reading_at_once() -> None:
    store = MemoryStore()
    points = [PointRecord(name="loss", step=step, version=1, value=0.5, at="now") for step in range(NUM_POINTS)]
    await store.put_metrics("a", points)

    async def seconds_of(limit: int) -> float:
        begun, after, num = time.thread_time(), 0, 0
        while rows := await store.metrics("a", names=(), after=after, limit=limit):
            after, num = rows[-1][0], num + len(rows)
        assert num == NUM_POINTS
        return time.thread_time() - begun

    at_once = min([await seconds_of(NUM_POINTS) for _ in range(3)])
    assert await seconds_of(100) < 20 * at_once
