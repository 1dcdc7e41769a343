"""Experiments with adapters of different ranks on one base, in one process of trainer, rollout and reward each."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from flotilla.shared.net.client.client import GatewayClient
from tests.fleet import RunningFleet, make_experiment, running_fleet

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(580)]

STEPS = 6
SECONDS = 400.0
ONE = {"rollouts": {"max": 1}, "rewards": {"max": 1}}
ENGINE, ALONE, TOGETHER = (
    "flotilla.services.rollout.engines.process.child",
    "flotilla.services.trainer.worker",
    "flotilla.services.trainer.hosting",
)


def experiment(directory: Path, name: str, lora: Mapping[str, Any] | None) -> dict[str, Any]:
    """Make a spec: of adapters, or of all weights."""
    model = {"path": str(directory / "model"), "dtype": "float32"} | ({} if lora is None else {"lora": dict(lora)})
    few = {"steps": STEPS, "groups_per_mini_batch": 4, "learning_rate": 1e-3}
    return make_experiment(directory, name=name, model=model, optimisation=few, resources=ONE)


class Experiments:
    """What runs on a fleet."""

    def __init__(self, fleet: RunningFleet, client: GatewayClient) -> None:
        self.fleet, self.client = fleet, client
        self.ids: list[str] = []
        self.sharers: set[float] = set()

    async def start(self, spec: dict[str, Any]) -> None:
        """Create and start one."""
        created = await self.client.call(
            "POST", "/v1/experiments", body=spec, params={"start": True}, deadline_seconds=60
        )
        self.ids.append(created["id"])

    async def views(self) -> list[dict[str, Any]]:
        """Look at all of them, and at how many share an engine."""
        services = await self.client.call("GET", "/v1/services", params={"kind": "rollout"}, deadline_seconds=60)
        self.sharers |= {each["observed"]["load"].get("engine_sharers", -1) for each in services["items"]}
        return [await self.client.call("GET", f"/v1/experiments/{each}", deadline_seconds=60) for each in self.ids]

    async def until(self, is_so: Any) -> None:
        """Wait until all of them are so."""
        end = time.monotonic() + SECONDS
        while not all(map(is_so, views := await self.views())):
            assert time.monotonic() < end and not any(each["state"] == "failed" for each in views), views
            await anyio.sleep(0.2)


async def test_they_share_processes_survive_the_end_of_one_and_train_to_the_end(tmp_path: Path) -> None:
    loras: tuple[dict[str, Any] | None, ...] = ({"rank": 4}, {"rank": 8, "targets": ["q_proj", "v_proj"]}, None)
    specs = [experiment(tmp_path, f"e{at}", lora) for at, lora in enumerate(loras)]
    with running_fleet(tmp_path / "fleet", experiments=3) as fleet:
        async with fleet.client() as client:
            running = Experiments(fleet, client)
            for spec in specs:
                await running.start(spec)
            await running.until(lambda view: view["step"] >= 1)
            counts = [len(fleet.pids(module)) for module in (ENGINE, ALONE, TOGETHER)]
            fleet.kill(TOGETHER)
            await running.until(lambda view: view["state"] == "completed")
            ledgers = [
                (await client.call("GET", f"/v1/experiments/{each}/ledger", deadline_seconds=60))["train"]
                for each in running.ids
            ]
            metrics = [(await running.views())[at]["policy_version"] for at in range(3)]

    assert counts == [2, 1, 1], "one engine and one worker for two of them, and of its own for the third"
    assert {2.0, 0.0} <= running.sharers
    assert metrics == [STEPS] * 3
    assert all(each["balanced"] and (each["trained"], each["outstanding"]) == (4 * STEPS, 0) for each in ledgers)
