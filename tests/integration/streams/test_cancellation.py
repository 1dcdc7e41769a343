"""A service that is told to stop stops, whatever its connection was doing at that moment."""

import asyncio
import random

from flotilla.shared.streams.hop import Hop, HopName
from flotilla.shared.streams.redis.plane import RedisDataPlane


async def test_a_cancelled_claimer_ends(plane: RedisDataPlane) -> None:
    async def keep_claiming(hop: Hop) -> None:
        while True:
            await hop.claim(4, wait_seconds=0.2)

    chance = random.Random(0)
    for _ in range(60):
        hop = plane.hop(HopName.TASKS, "rollout")
        claimers = [asyncio.create_task(keep_claiming(hop)) for _ in range(8)]
        await asyncio.sleep(chance.random() * 0.02)

        for claimer in claimers:
            claimer.cancel()

        _, left = await asyncio.wait(claimers, timeout=30)
        for claimer in left:
            claimer.cancel()
        assert not left, "a cancellation was lost"
