"""An experiment that failed goes on from its checkpoint, once somebody resumes it."""

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flotilla.shared.errors import ActionNotAllowed
from flotilla.shared.net.client.client import GatewayClient
from tests.faults.test_kill import patiently, until_completed, until_step
from tests.fleet import RunningFleet, hold_back, make_experiment, running_fleet

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(580)]

STEPS = 16
HELD_STEPS = 7
FAILED_SECONDS = 240.0


async def kill_until_failed(fleet: RunningFleet, client: GatewayClient, path: str) -> dict[str, Any]:
    """Kill the training process as often as it comes back, until its supervisor gives up."""
    end = time.monotonic() + FAILED_SECONDS
    while True:
        view: dict[str, Any] = await patiently(client, path)
        if view["state"] == "failed":
            return view
        assert time.monotonic() < end, view
        if fleet.pids("flotilla.services.trainer.worker"):
            fleet.kill("flotilla.services.trainer.worker")
        await asyncio.sleep(0.2)


async def until_at_rest(client: GatewayClient, path: str) -> None:
    end = time.monotonic() + FAILED_SECONDS
    while (await patiently(client, f"{path}/ledger"))["train"]["outstanding"]:
        assert time.monotonic() < end
        await asyncio.sleep(0.2)


async def resume(client: GatewayClient, path: str) -> None:
    """Resume it as soon as its services have come to rest: until then that is refused."""
    end = time.monotonic() + FAILED_SECONDS
    while True:
        try:
            await client.call("POST", f"{path}/resume", deadline_seconds=60)
            return
        except ActionNotAllowed as error:
            assert time.monotonic() < end, error
        await asyncio.sleep(0.2)


async def test_what_failed_is_resumed_from_its_checkpoint(tmp_path: Path) -> None:
    spec = make_experiment(tmp_path, optimisation={"steps": STEPS}, checkpoint={"every_steps": 4})
    hold = hold_back(spec, tmp_path, after_step=HELD_STEPS)
    with running_fleet(tmp_path / "fleet") as fleet:
        async with fleet.client() as client:
            experiment_id = (await client.call("POST", "/v1/experiments", body=spec, deadline_seconds=60))["id"]
            path = f"/v1/experiments/{experiment_id}"
            await client.call("POST", f"{path}/start", deadline_seconds=60)
            await until_step(client, experiment_id, HELD_STEPS - 1)
            failed = await kill_until_failed(fleet, client, path)
            await until_at_rest(client, path)
            hold.unlink()
            await resume(client, path)
            completed = await until_completed(client, experiment_id)
            ledger = (await client.call("GET", f"{path}/ledger"))["train"]
            plans = [await client.call("GET", f"{path}/steps/{step}") for step in range(1, STEPS + 1)]

    assert failed["problem"]["component"] == "trainer"
    assert completed["problem"] is None
    assert ledger["balanced"]
    assert ledger["outstanding"] == ledger["planned"] == 0
    trained = Counter(group for plan in plans for group in plan["group_ids"])
    assert max(trained.values()) == 1
    assert len(trained) == ledger["trained"] == STEPS * spec["optimisation"]["groups_per_mini_batch"]
    versions = [plan["version"] for plan in plans]
    assert versions == sorted(set(versions))
