"""Environments by name drive whole training runs, and their reward rises: Harbor tasks, NeMo Gym, verifiers 0.4.

The first and the last are keys of the spec, whose agent the fleet starts and ends; the other's is typed beside it.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from flotilla.agents.box import why_not
from flotilla.shared.net.client.client import GatewayClient
from tests.e2e.test_agents import rewards_of
from tests.fleet import ROOT, RunningFleet, running_fleet
from tests.integration.gateway.test_nemo_gym import a_real_server
from tests.integration.gateway.test_tasksets import interpreter_with_tasksets

NUM_STEPS = 16
PREPARED = "examples/arithmetic/prepared/standard-0"
HARNESS = ROOT / "examples" / "harbor"
AGENTS = "flotilla.agents"
LEARN_SECONDS = 900.0
ENDED = {"completed", "stopped", "failed"}

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]
During = Callable[[RunningFleet, GatewayClient, str], Awaitable[None]]


@pytest.fixture(scope="module")
def problems() -> Path:
    """Prepare the model and the problems once."""
    prepare = [sys.executable, "examples/arithmetic/prepare.py", "--preset", "standard", "--seed", "0"]
    subprocess.run([*prepare, "--output", PREPARED], cwd=ROOT, check=True, timeout=600)
    return ROOT / PREPARED / "train.jsonl"


def said(python: str, *words: str, token: str = "", url: str = "") -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FLOTILLA_TOKEN": token, "FLOTILLA_GATEWAY_URL": url}
    done = subprocess.run(
        [python, *words], cwd=ROOT, capture_output=True, text=True, timeout=1200, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def learn(folder: Path, spec: str, rows: Path, during: During, **keys: Any) -> None:
    """Train, with something done beside it; the reward must rise, the ledger balance, and no agent be left."""

    async def run() -> None:
        with running_fleet(folder) as fleet:
            given = {"optimisation.steps": NUM_STEPS, "data.path": str(rows), "data.label_column": None, **keys}
            words = [word for key, value in given.items() for word in ("--set", f"{key}={json.dumps(value)}")]
            # As a user of this machine does, who so allows what the spec starts.
            started = said(sys.executable, "-m", "flotilla", "start", spec, *words, "--json", "--data", str(folder))
            experiment = json.loads(started)["id"]
            async with fleet.client() as client:
                await during(fleet, client, experiment)
                view = await ended(client, experiment)
                rewards = await rewards_of(client, experiment)
                ledger = await client.call("GET", f"/v1/experiments/{experiment}/ledger")
                async with asyncio.timeout(30):
                    while fleet.pids(AGENTS):
                        await asyncio.sleep(0.1)
        print(rewards)
        assert view["state"] == "completed", view.get("problem")
        assert len(rewards) == NUM_STEPS
        assert mean(rewards[-4:]) > mean(rewards[:4]) + 0.15, rewards
        assert ledger["train"]["balanced"]

    asyncio.run(run())


async def ended(client: GatewayClient, experiment: str) -> Mapping[str, Any]:
    """Wait for an experiment's end."""
    view: Mapping[str, Any] = {}
    async with asyncio.timeout(LEARN_SECONDS):
        while (view := await client.call("GET", f"/v1/experiments/{experiment}"))["state"] not in ENDED:
            await asyncio.sleep(1)
    return view


async def nothing(fleet: RunningFleet, client: GatewayClient, experiment: str) -> None:
    """Let the fleet alone."""


async def killed(fleet: RunningFleet, client: GatewayClient, experiment: str) -> None:
    """Kill the agent in the middle of its episodes; another one takes its place."""
    while len(await rewards_of(client, experiment)) < 2:
        assert fleet.process.poll() is None
        await asyncio.sleep(0.5)
    # The agent is the child of its keeper, whose command holds the same words.
    gone = max(fleet.pids(AGENTS))
    os.kill(gone, 9)
    async with asyncio.timeout(60):
        while not set(fleet.pids(AGENTS)) - {gone}:
            await asyncio.sleep(0.1)


@pytest.mark.skipif(why_not() is not None, reason=f"there are no boxes here: {why_not()}")
def test_the_reward_of_harbor_tasks_rises_though_their_agent_is_killed(tmp_path: Path, problems: Path) -> None:
    tasks, rows = tmp_path / "tasks", tmp_path / "rows.jsonl"
    said(sys.executable, "examples/harbor/make_tasks.py", str(problems), str(tasks))
    assert said(sys.executable, "-m", AGENTS, "harbor-rows", str(tasks), str(rows)) == "200 rows\n"
    harness = {"harness": f"python3 {HARNESS}/harness.py", "readable": [str(HARNESS)]}
    keys = {
        "rollout.agents.environment": {"kind": "harbor", "tasks": str(tasks), **harness},
        "rollout.agents.lease_seconds": 20,
    }

    learn(tmp_path, "examples/harbor/experiment.yaml", rows, killed, **keys)


def test_the_reward_of_a_nemo_gym_server_rises(tmp_path: Path, problems: Path) -> None:
    data, rows = tmp_path / "data.jsonl", tmp_path / "rows.jsonl"
    said(sys.executable, "examples/nemo_gym/server.py", "--rows", str(problems), str(data))
    assert said(sys.executable, "-m", AGENTS, "nemo-gym-rows", str(data), str(rows)) == "2000 rows\n"

    with a_real_server() as url:

        async def played(fleet: RunningFleet, client: GatewayClient, experiment: str) -> None:
            words = ("-m", AGENTS, "nemo-gym", url, experiment, "--parallel", "32")
            print(await asyncio.to_thread(said, sys.executable, *words, token=fleet.token, url=fleet.url))

        learn(tmp_path, "examples/nemo_gym/experiment.yaml", rows, played)


def test_the_reward_of_a_taskset_of_verifiers_rises(tmp_path: Path, problems: Path) -> None:
    python, rows = interpreter_with_tasksets(tmp_path / "interpreter"), tmp_path / "rows.jsonl"
    taskset, options = str(ROOT / "examples/verifiers/arithmetic_taskset.py"), {"taskset": {"path": str(problems)}}
    wrote = said(python, "-m", AGENTS, "verifiers-rows", taskset, str(rows), "--options", json.dumps(options))
    assert wrote == "2000 rows\n"
    environment = {"kind": "verifiers", "python": python, "taskset": taskset, "options": options, "parallel": 32}

    learn(tmp_path, "examples/verifiers/experiment.yaml", rows, nothing, **{"rollout.agents.environment": environment})
