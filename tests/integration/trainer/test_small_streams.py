"""A bound on the streams that holds few steps' groups, and checkpoints that are due much later: nothing stands still.

Groups of steps that no checkpoint contains stay in the scored stream. Where they fill it, no group can come for the
next step, and no step can lead to the next checkpoint.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from flotilla.shared.streams.hop import StreamsConfig
from flotilla.shared.streams.redis.connection import connect
from flotilla.shared.streams.redis.plane import RedisDataPlane
from tests.integration.conftest import redis_url
from tests.integration.trainer.fleet import ScriptedFleet, YesGateway, a_session, a_spec, save_tiny_model, train

__all__ = ["redis_url"]

R = 2
STEPS = 12
STREAM_BYTES = 30_000
"""Some five steps' groups, as the server estimates them."""


@pytest.fixture
async def plane(redis_url: str) -> AsyncIterator[RedisDataPlane]:
    client = connect(redis_url)
    opened = RedisDataPlane(client, "small", config=StreamsConfig(lease_seconds=0.5))
    try:
        yield opened
        await opened.remove()
    finally:
        await client.aclose()


def spec_of(tmp_path: Path, **asynchrony: Any) -> Any:
    return a_spec(
        save_tiny_model(tmp_path / "model"),
        rollout={"group_size": 4, "sampling": {"max_new_tokens": 60}},
        optimisation={"steps": STEPS, "groups_per_mini_batch": R},
        checkpoint={"every_steps": 100},
        asynchrony=asynchrony,
    )


async def trained_groups(plane: RedisDataPlane) -> Counter[int]:
    plans = [await plane.trainer("reader").lineage(step) for step in range(1, STEPS + 1)]
    return Counter(group for plan in plans if plan is not None for group in plan.group_ids)


@pytest.mark.parametrize(
    "asynchrony",
    [
        pytest.param({}, id="on-policy"),
        pytest.param({"staleness_threshold": 1.0}, id="with a surplus", marks=pytest.mark.long),
        pytest.param({"trigger_parameter_sync_step": 12}, id="all steps in one version"),
    ],
)
async def test_a_checkpoint_is_made_early_where_planned_groups_leave_no_room(
    tmp_path: Path, plane: RedisDataPlane, asynchrony: dict[str, Any]
) -> None:
    gateway = YesGateway(plane)
    await plane.admission.bound(STREAM_BYTES)

    assert await train(spec_of(tmp_path, **asynchrony), tmp_path / "run", plane, gateway)

    early = sum(values["checkpoint/early"] for values in gateway.metrics.values())
    assert early >= 2
    # The last step's own may have been due early as well.
    assert len(gateway.checkpoints) in {early, early + 1}
    assert gateway.checkpoints[-1] == STEPS
    ledger = await plane.ledger()
    assert ledger.balanced
    assert (ledger.trained, ledger.planned) == (R * STEPS, 0)
    trained = await trained_groups(plane)
    assert (len(trained), max(trained.values())) == (R * STEPS, 1)


async def test_a_crash_between_an_early_checkpoint_and_the_next_version_trains_nothing_twice(
    tmp_path: Path, plane: RedisDataPlane
) -> None:
    spec = spec_of(tmp_path, trigger_parameter_sync_step=STEPS)
    gateway = YesGateway(plane)
    await plane.admission.bound(STREAM_BYTES)
    fleet = ScriptedFleet(spec, plane, gateway)
    fleet.ends_before = 8 * R
    async with a_session(spec, tmp_path / "run", plane, gateway) as (session, _), asyncio.timeout(240):
        work = [asyncio.create_task(fleet.run()), asyncio.create_task(session.run())]
        while session.loop.progress.step < 8:
            await asyncio.sleep(0.01)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
    before = await plane.ledger()
    assert gateway.checkpoints == [5]

    assert await train(spec, tmp_path / "run", plane, gateway)

    assert (before.balanced, before.trained) == (True, 5 * R)
    assert before.planned >= 3 * R
    ledger = await plane.ledger()
    assert (ledger.balanced, ledger.trained, ledger.planned) == (True, R * STEPS, 0)
    trained = await trained_groups(plane)
    assert (len(trained), max(trained.values())) == (R * STEPS, 1)
