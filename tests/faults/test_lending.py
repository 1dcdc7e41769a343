"""A trainer lends its devices while it waits for a slow sampler: steps take shorter, whoever is killed meanwhile."""

import os
import signal
import subprocess
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest

from flotilla.shared.net.client.client import GatewayClient
from flotilla.shared.schemas.service import LENT
from tests.faults.test_kill import until_completed
from tests.faults.test_time_sharing import ENGINE, WORKER
from tests.faults.trial import PATIENCE_SECONDS, Trial, joining, waited
from tests.fleet import make_experiment, running_fleet

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(580)]

STEPS, GROUPS, UNTIL = 30, 6, 5
SLOW = "engine.step slow in=engine seconds=0.02"
"""Each token of a group takes so long, whatever the cores have to do."""
GATEWAY = "flotilla.services.gateway"


async def until_lent(trial: Trial, process: "subprocess.Popen[bytes]") -> None:
    """Wait until the rollout samples on the trainer's devices, in a shift that has begun since."""

    async def shift() -> int | None:
        listed = await trial.client.call("GET", "/v1/services", params={"kind": "rollout"})
        for each in listed["items"]:
            device = each["observed"]["device"]
            if each["pid"] == process.pid and device and device["is_held"] and each["observed"]["load"].get("running"):
                found: int = device["shift"]
                return found
        return None

    await waited(shift, PATIENCE_SECONDS, "the devices to be lent", pause_seconds=0.01)


async def until_step(trial: Trial, step: int) -> None:
    async def is_done() -> bool:
        view = await trial.client.call("GET", trial.path)
        return bool(view["step"] >= step)

    await waited(is_done, PATIENCE_SECONDS, f"step {step}")


async def values_of(client: GatewayClient, trial: Trial, name: str) -> dict[int, float]:
    page = await client.call("GET", f"{trial.path}/metrics", params={"names": name, "limit": 1000})
    return {point["step"]: point["value"] for point in page["items"]}


def kill_child(process: "subprocess.Popen[bytes]", name: str) -> None:
    for child in psutil.Process(process.pid).children(recursive=True):
        if name in child.cmdline():
            child.kill()


def a_slow_spec(directory: Path) -> dict[str, Any]:
    return make_experiment(
        directory,
        rollout={
            "sampling": {"max_new_tokens": 24, "ignore_eos": True},
            "engine": {"slots": 4, "context_tokens": 128, "threads": 1},
        },
        optimisation={"steps": STEPS, "groups_per_mini_batch": GROUPS},
        asynchrony={"staleness_threshold": 0.0, "on_weight_update": "drain"},
        resources={"lending": {"over_steps": UNTIL}},
    )


async def test_a_slow_sampler_is_helped_and_kills_lose_nothing(tmp_path: Path) -> None:
    with running_fleet(tmp_path / "fleet", FLOTILLA_FAULTS=SLOW) as fleet:
        async with fleet.client() as client:
            trial = await Trial.start(fleet, client, a_slow_spec(tmp_path))
            with joining(fleet.data, tmp_path / "lent.log", "--pool", LENT, FLOTILLA_FAULTS=SLOW) as lent:
                await until_lent(trial, lent)
                await until_step(trial, 2 * UNTIL)
                lent_seconds = await values_of(client, trial, "time/lent_seconds")
                waits = await values_of(client, trial, "time/wait_seconds")
                back = await values_of(client, trial, "time/device_seconds")

                await until_lent(trial, lent)
                fleet.kill(WORKER)
                await until_lent(trial, lent)
                kill_child(lent, ENGINE)
                await until_lent(trial, lent)
                fleet.kill(GATEWAY)
                await until_step(trial, STEPS - 3)
                os.kill(lent.pid, signal.SIGKILL)
            view = await until_completed(client, trial.id)
            ledgers = await client.call("GET", f"{trial.path}/ledger")

    assert view["step"] == STEPS
    assert ledgers["train"]["balanced"] and ledgers["train"]["trained"] == STEPS * GROUPS
    helped = [waits[step] + back[step] for step, seconds in lent_seconds.items() if seconds > 0.1]
    alone = [waits[step] for step in waits if 1 < step <= UNTIL]
    print(f"a step waited {median(alone):.2f} s, and {median(helped):.2f} s with the trainer's devices lent")
    assert median(helped) < 0.9 * median(alone)
