"""What an experiment has in Redis comes back on another server as it was: ledger, claims, what waits."""

import uuid
from pathlib import Path

import pytest

from flotilla.backup.keys import dump_keys, restore_keys, summary_of
from flotilla.cli.redis_server import LocalRedis
from flotilla.shared.errors import Conflict
from flotilla.shared.streams.hop import HopName
from flotilla.shared.streams.redis.connection import connect
from flotilla.shared.streams.redis.plane import RedisDataPlane
from flotilla.shared.testing.builders import a_group
from tests.contract.streams.conftest import issue


async def test_streams_and_ledger_are_restored_on_another_server(redis_url: str, tmp_path: Path) -> None:
    experiment_id = uuid.uuid4().hex
    here = connect(redis_url)
    plane = RedisDataPlane(here, experiment_id)
    await issue(plane, 3)
    tasks = plane.hop(HopName.TASKS, "rollout")
    (claim,) = await tasks.claim(wait_seconds=0)
    assert await tasks.forward(claim, a_group(claim.task()))
    await tasks.claim(wait_seconds=0)
    before = await plane.ledger()

    await dump_keys(redis_url, [experiment_id], tmp_path)

    with LocalRedis(tmp_path / "other") as server:
        await restore_keys(server.url, [experiment_id], tmp_path)
        there = connect(server.url)
        after = await RedisDataPlane(there, experiment_id).ledger()
        with pytest.raises(Conflict, match="has keys of"):
            await restore_keys(server.url, [experiment_id], tmp_path)
        await there.aclose()
    await here.aclose()
    assert before.balanced and after == before
    assert (before.issued, before.waiting.generated, before.claimed.tasks) == (3, 1, 1)
    summary = summary_of(tmp_path / f"{experiment_id}.jsonl")
    assert summary is not None and (summary.committed, summary.plans) == (0, ())
