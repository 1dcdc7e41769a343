"""Kill -9 of each kind of process in turn, during a run: it finishes, the ledger balances, nothing is trained twice."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flotilla.shared.errors import FlotillaError
from flotilla.shared.net.client.client import GatewayClient
from tests.fleet import hold_back, make_experiment, running_fleet

pytestmark = [pytest.mark.long, pytest.mark.timeout(580)]

STEPS = 40
HELD_STEPS = 36
"""The rest waits until everybody was killed."""
VICTIMS = (
    "flotilla.services.rollout",
    "flotilla.services.rollout.engines.process.child",
    "flotilla.services.reward",
    "flotilla.services.trainer.worker",
    "flotilla.services.trainer",
    "flotilla.services.gateway",
)


async def patiently(client: GatewayClient, path: str) -> Any:
    """Read from a gateway that may be away for a moment."""
    return await client.call("GET", path, deadline_seconds=60, attempt_seconds=5)


async def until_step(client: GatewayClient, experiment_id: str, step: int, seconds: float = 240) -> dict[str, Any]:
    """Wait for a step, or the end; for so long only while nothing gets on."""
    return await _until(client, experiment_id, lambda view: bool(view["step"] >= step), seconds)


async def until_completed(client: GatewayClient, experiment_id: str, seconds: float = 300) -> dict[str, Any]:
    """Wait for the end; for so long only while nothing gets on."""
    return await _until(client, experiment_id, lambda _: False, seconds)


async def _until(
    client: GatewayClient, experiment_id: str, is_there: Callable[[dict[str, Any]], bool], seconds: float
) -> dict[str, Any]:
    newest, end = None, 0.0
    while True:
        view: dict[str, Any] = await patiently(client, f"/v1/experiments/{experiment_id}")
        assert view["state"] != "failed", view["problem"]
        if is_there(view) or view["state"] == "completed":
            return view
        if (seen := (view["state"], view["step"], view["policy_version"])) != newest:
            newest, end = seen, time.monotonic() + seconds
        assert time.monotonic() < end, f"nothing has got on for {seconds} s: {view}"
        await asyncio.sleep(0.1)


async def watch_balance(client: GatewayClient, experiment_id: str, seen: list[bool]) -> None:
    """Ask the ledger all the time: it balances at every instant, not only at the end."""
    while True:
        try:
            ledger = await client.call("GET", f"/v1/experiments/{experiment_id}/ledger", deadline_seconds=2)
            seen.append(ledger["train"]["balanced"])
        except FlotillaError:
            pass
        await asyncio.sleep(0.05)


async def test_a_run_survives_the_death_of_each_process(tmp_path: Path) -> None:
    spec = make_experiment(tmp_path, optimisation={"steps": STEPS}, checkpoint={"every_steps": 5})
    hold = hold_back(spec, tmp_path, after_step=HELD_STEPS)
    with running_fleet(tmp_path / "fleet") as fleet:
        async with fleet.client() as client:
            view = await client.call("POST", "/v1/experiments", body=spec, deadline_seconds=60)
            await client.call("POST", f"/v1/experiments/{view['id']}/start", deadline_seconds=60)
            balanced: list[bool] = []
            watching = asyncio.create_task(watch_balance(client, view["id"], balanced))
            step = 2
            for victim in VICTIMS:
                await until_step(client, view["id"], step)
                fleet.kill(victim)
                # Past the next checkpoint is not needed: what was planned since the last one is replayed.
                step = min(step + 6, HELD_STEPS)
            hold.unlink()
            await until_completed(client, view["id"])
            watching.cancel()
            ledger = (await patiently(client, f"/v1/experiments/{view['id']}/ledger"))["train"]
            checkpoint = (await patiently(client, f"/v1/experiments/{view['id']}/checkpoints"))["items"][-1]
            plans = [await patiently(client, f"/v1/experiments/{view['id']}/steps/{n}") for n in range(1, STEPS + 1)]

    assert len(balanced) > 50
    assert all(balanced)
    assert ledger["balanced"]
    assert ledger["outstanding"] == 0
    assert ledger["trained"] == STEPS * spec["optimisation"]["groups_per_mini_batch"]
    trained = Counter(group for plan in plans for group in plan["group_ids"])
    assert max(trained.values()) == 1
    assert len(trained) == ledger["trained"]
    state = json.loads((Path(checkpoint["path"]) / "state.json").read_text())
    assert ids_of(state["trained"]) == set(trained)


def ids_of(intervals: list[list[int]]) -> set[int]:
    return {number for start, end in intervals for number in range(start, end + 1)}
