"""A trainer of two ranks: what it learns is what one learns, though both are killed."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from flotilla.shared.net.client.client import GatewayClient
from tests.faults.test_kill import patiently, until_completed, until_step
from tests.fleet import RunningFleet, make_experiment, running_fleet

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(580)]

STEPS = 12
FORKED_STEP = 8
TOLERANCE = 1e-5
NAMED_SECONDS = 10.0
COMPARED = ("loss/total", "grad_norm", "reward/mean", "advantage/mean_square")
OF_CRITICS = ("loss/value", "value/mean")
Curve = dict[tuple[int, str], float]


def an_experiment(directory: Path, **parallelism: int) -> dict[str, Any]:
    return make_experiment(
        directory,
        rollout={"engine": {"slots": 16, "context_tokens": 128, "batch_invariant": True}},
        optimisation={"steps": STEPS, "learning_rate": 1e-3, "micro_batch_tokens": 256},
        asynchrony={"staleness_threshold": 0.0, "on_weight_update": "drain"},
        parallelism=parallelism,
    )


async def start(client: GatewayClient, spec: dict[str, Any]) -> str:
    view = await client.call("POST", "/v1/experiments", body=spec, deadline_seconds=60)
    await client.call("POST", f"/v1/experiments/{view['id']}/start", deadline_seconds=60)
    return str(view["id"])


async def fork(client: GatewayClient, experiment_id: str, step: int, changes: dict[str, Any]) -> str:
    path, body = f"/v1/experiments/{experiment_id}/fork", {"step": step, "changes": changes}
    return str((await client.call("POST", path, body=body, deadline_seconds=60))["id"])


async def curve_of(client: GatewayClient, experiment_id: str) -> Curve:
    path = f"/v1/experiments/{experiment_id}/metrics"
    page = await client.call("GET", path, params={"names": ",".join((*COMPARED, *OF_CRITICS)), "limit": 2000})
    return {(point["step"], point["name"]): point["value"] for point in page["items"]}


async def check_ledger(client: GatewayClient, experiment_id: str, spec: dict[str, Any]) -> None:
    ledger = (await patiently(client, f"/v1/experiments/{experiment_id}/ledger"))["train"]
    assert ledger["balanced"]
    assert ledger["trained"] == spec["optimisation"]["steps"] * spec["optimisation"]["groups_per_mini_batch"]


def kill_rank(fleet: RunningFleet, rank: int) -> float:
    """Kill -9 a rank; returns when."""
    for pid in fleet.pids("flotilla.services.trainer.worker"):
        if psutil.Process(pid).environ().get("RANK") == str(rank):
            os.kill(pid, signal.SIGKILL)
            return time.monotonic()
    raise AssertionError(f"rank {rank} does not run")


async def until_named(client: GatewayClient, cause: str) -> float:
    while True:
        services = await client.call("GET", "/v1/services", params={"kind": "trainer"})
        failures = [each["observed"].get("failure") or {} for each in services["items"]]
        if any(cause in failure.get("cause", "") for failure in failures):
            return time.monotonic()
        await asyncio.sleep(0.1)


async def test_two_ranks_are_killed_and_learn_what_one_learns_and_one_goes_on(tmp_path: Path) -> None:
    with running_fleet(tmp_path / "fleet") as fleet:
        async with fleet.client() as client:
            alone = await start(client, an_experiment(tmp_path))
            await until_completed(client, alone)
            expected = await curve_of(client, alone)
            spec = an_experiment(tmp_path, ranks=2)
            several = await start(client, spec)
            for step, rank in ((3, 1), (7, 0)):
                await until_step(client, several, step)
                killed = kill_rank(fleet, rank)
                named = await until_named(client, f"rank {rank} of 2 was ended by SIGKILL")
                assert named - killed < NAMED_SECONDS
            await until_completed(client, several)
            found = await curve_of(client, several)
            await check_ledger(client, several, spec)
            resharded = await fork(client, several, FORKED_STEP, {"parallelism": {"ranks": 1}})
            await until_completed(client, resharded)
            continued = await curve_of(client, resharded)

    assert found.keys() == expected.keys()
    assert len(found) == STEPS * len(COMPARED)
    assert {step for step, _ in continued} == set(range(FORKED_STEP + 1, STEPS + 1))
    for key, value in (*found.items(), *continued.items()):
        assert value == pytest.approx(expected[key], abs=TOLERANCE, rel=TOLERANCE), key


async def test_ranks_that_are_divided_otherwise_for_a_critic_are_killed_and_learn_what_one_learns(
    tmp_path: Path,
) -> None:
    sections = {"algorithm": {"advantage": {"kind": "gae"}}}
    divided = sections | {"parallelism": {"threads": 1, "ranks": 2, "critic": {"tensor_parallel": 2}}}
    with running_fleet(tmp_path / "fleet") as fleet:
        async with fleet.client() as client:
            alone = await start(client, an_experiment(tmp_path) | sections)
            await until_completed(client, alone)
            expected = await curve_of(client, alone)
            spec = an_experiment(tmp_path) | divided
            several = await start(client, spec)
            for step, rank in ((5, 1), (9, 0)):
                await until_step(client, several, step)
                kill_rank(fleet, rank)
                await until_named(client, f"rank {rank} of 2 was ended by SIGKILL")
            await until_completed(client, several)
            found = await curve_of(client, several)
            await check_ledger(client, several, spec)
            changes = {
                "parallelism": {
                    "ranks": 2,
                    "tensor_parallel": 2,
                    "critic": {"tensor_parallel": 1, "sequence_parallel": 2},
                }
            }
            resharded = await fork(client, several, FORKED_STEP, changes)
            await until_completed(client, resharded)
            continued = await curve_of(client, resharded)

    assert len(found) == STEPS * len((*COMPARED, *OF_CRITICS))
    assert {step for step, _ in continued} == set(range(FORKED_STEP + 1, STEPS + 1))
    for key, value in (*found.items(), *continued.items()):
        assert value == pytest.approx(expected[key], abs=TOLERANCE, rel=TOLERANCE), key
