"""Two real trainers on the groups of one rollout: the subscriber's is killed, and the gateway; both ledgers balance."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from flotilla.shared.net.client.client import GatewayClient
from tests.faults.test_two_experiments import all_of, until
from tests.fleet import RunningFleet, make_experiment, running_fleet

pytestmark = [pytest.mark.long, pytest.mark.timeout(580)]

STEPS = 8
WORKER, GATEWAY = "flotilla.services.trainer.worker", "flotilla.services.gateway"


async def losses(client: GatewayClient, experiment_id: str) -> dict[int, float]:
    points = await all_of(client, f"/v1/experiments/{experiment_id}/metrics")
    return {point["step"]: point["value"] for point in points if point["name"] == "loss/total"}


def specs(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Make a source, and a subscriber with the same settings that drops nothing for its age.

    The source samples a step's groups when it has trained the step before, so both train the same groups in each step.
    """
    same: dict[str, Any] = {"optimisation": {"steps": STEPS}, "checkpoint": {"every_steps": 3}}
    in_turns = {"staleness_threshold": 0.0, "on_weight_update": "drain"}
    source = make_experiment(folder, asynchrony=in_turns, **same)
    taker = make_experiment(folder, asynchrony={"staleness_threshold": 1.0, "max_lag": STEPS}, **same)
    return source, taker | {"name": "taker", "data": {"from": "trial"}}


async def run(fleet: RunningFleet, folder: Path) -> None:
    source_spec, taker_spec = specs(folder)
    async with fleet.client() as client:
        source = (await client.call("POST", "/v1/experiments", body=source_spec))["id"]
        taker = (await client.call("POST", "/v1/experiments", body=taker_spec, params={"start": True}))["id"]
        await until(client, taker, lambda view: view["state"] == "running")
        await client.call("POST", f"/v1/experiments/{source}/start")

        await until(client, taker, lambda view: view["step"] >= 2)
        fleet.kill(WORKER)
        await until(client, taker, lambda view: view["step"] >= 4)
        fleet.kill(GATEWAY)
        for each in (source, taker):
            view = await until(client, each, lambda view: view["state"] in {"completed", "failed", "stopped"}, 240)
            assert (view["state"], view["step"]) == ("completed", STEPS), view["problem"]

        ledgers = [(await client.call("GET", f"/v1/experiments/{each}/ledger"))["train"] for each in (source, taker)]
        assert all(each["balanced"] and each["outstanding"] == 0 for each in ledgers)
        assert [each["trained"] for each in ledgers] == [STEPS * 4] * 2
        assert ledgers[1]["dropped"] == {} and ledgers[1]["failed"] == {}
        views = [await client.call("GET", f"/v1/experiments/{each}") for each in (source, taker)]
        assert [each["groups_from"] for each in views] == [None, source]
        of_source, of_taker = await losses(client, source), await losses(client, taker)
        assert of_source.keys() == set(range(1, STEPS + 1))
        assert of_taker == pytest.approx(of_source, abs=1e-5)


def test_two_trainers_train_what_one_rollout_samples(tmp_path: Path) -> None:
    with running_fleet(tmp_path / "fleet", trainers=2) as fleet:
        asyncio.run(run(fleet, tmp_path))
