"""Trainer and rollouts take turns on the same devices: the same losses as side by side, whoever is killed when."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from flotilla.services.gateway.registry.shifts import holder_of
from flotilla.shared.net.client.client import GatewayClient
from flotilla.shared.schemas.service import ServiceKind
from tests.faults.test_kill import until_completed
from tests.faults.test_loss_curve import COMPARED, curve_of, start
from tests.faults.trial import PATIENCE_SECONDS, waited
from tests.fleet import RunningFleet, make_experiment, running_fleet

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(580)]

STEPS = 8
ENGINE, WORKER = "flotilla.services.rollout.engines.process.child", "flotilla.services.trainer.worker"
KILLS = (
    (ServiceKind.ROLLOUT, ENGINE),
    (ServiceKind.TRAINER, WORKER),
    (ServiceKind.ROLLOUT, WORKER),
    (ServiceKind.TRAINER, ENGINE),
)
"""Whose turn it is, and who is killed in it."""


async def until_turn_of(client: GatewayClient, experiment_id: str, holder: ServiceKind, after: int) -> int:
    """Wait until one kind has the devices in a shift after this one, and return its number."""

    async def has_it() -> int | None:
        listed = await client.call("GET", "/v1/services", params={"kind": holder.value})
        for each in listed["items"]:
            device = each["observed"]["device"]
            if each["observed"]["experiment_id"] == experiment_id and device and device["is_held"]:
                shift: int = device["shift"]
                if shift > after and holder_of(shift) is holder:
                    return shift
        return None

    return await waited(has_it, PATIENCE_SECONDS, f"the {holder} to have the devices", pause_seconds=0.005)


async def kill_in_each_turn(fleet: RunningFleet, client: GatewayClient, experiment_id: str) -> None:
    shift = 2
    for holder, victim in KILLS:
        shift = await until_turn_of(client, experiment_id, holder, shift)
        for pid in fleet.pids(victim):
            os.kill(pid, signal.SIGKILL)


def a_spec(directory: Path, sharing: str, **asynchrony: Any) -> dict[str, Any]:
    return make_experiment(
        directory,
        rollout={"engine": {"slots": 16, "context_tokens": 128, "batch_invariant": True}},
        optimisation={"steps": STEPS, "learning_rate": 1e-3},
        asynchrony={"staleness_threshold": 0.0, "on_weight_update": "drain", **asynchrony},
        evaluation={"path": str(directory / "heldout.jsonl"), "every_versions": 4, "max_rows": 8},
        resources={"sharing": sharing},
    )


async def test_turns_and_kills_in_them_change_no_loss_and_no_group_is_lost(tmp_path: Path) -> None:
    curves = []
    with running_fleet(tmp_path / "fleet") as fleet:
        async with fleet.client() as client:
            for sharing, is_faulty in (("none", False), ("time", True)):
                experiment_id = await start(client, a_spec(tmp_path, sharing))
                if is_faulty:
                    await kill_in_each_turn(fleet, client, experiment_id)
                view = await until_completed(client, experiment_id)
                assert view["step"] == STEPS
                curves.append(await curve_of(client, experiment_id, STEPS))
                ledgers = await client.call("GET", f"/v1/experiments/{experiment_id}/ledger")
                assert ledgers["train"]["balanced"] and ledgers["train"]["trained"] == STEPS * 4
                metrics = {"names": "evaluation/reward_mean", "limit": 100}
                page = await client.call("GET", f"/v1/experiments/{experiment_id}/metrics", params=metrics)
                assert {0, 4, 8} <= {point["version"] for point in page["items"]}

    side_by_side, in_turns = curves
    for step in range(1, STEPS + 1):
        for name in COMPARED:
            assert in_turns[step][name] == pytest.approx(side_by_side[step][name], abs=1e-5, rel=1e-5), (step, name)
