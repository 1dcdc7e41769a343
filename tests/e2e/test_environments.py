"""Environments by name drive whole training runs, and their reward rises: Harbor tasks, NeMo Gym."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import pytest

from flotilla.agents.box import why_not
from tests.e2e.test_agents import rewards_of, typed
from tests.fleet import ROOT, running_fleet
from tests.integration.gateway.test_nemo_gym import a_real_server

NUM_STEPS = 16
PREPARED = "examples/arithmetic/prepared/standard-0"
HARNESS = ROOT / "examples" / "harbor"

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]


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


def learn(folder: Path, spec: str, rows: Path, python: str, agent: Sequence[str]) -> None:
    """Train with an agent beside the fleet; the reward must rise, and the ledger balance."""

    async def run() -> None:
        with running_fleet(folder) as fleet:
            sets = [f"optimisation.steps={NUM_STEPS}", f"data.path={rows}", "data.label_column=null"]
            words = [word for each in sets for word in ("--set", each)]
            experiment = json.loads(typed(fleet, "-m", "flotilla", "start", spec, *words, "--json"))["id"]
            kind, source, *options = agent
            playing = ("-m", "flotilla.agents", kind, source, experiment, *options)
            told = await asyncio.to_thread(said, python, *playing, token=fleet.token, url=fleet.url)
            async with fleet.client() as client:
                rewards = await rewards_of(client, experiment)
                ledger = await client.call("GET", f"/v1/experiments/{experiment}/ledger")
        print(told, rewards)
        assert len(rewards) == NUM_STEPS
        assert mean(rewards[-4:]) > mean(rewards[:4]) + 0.15, rewards
        assert ledger["train"]["balanced"]

    asyncio.run(run())


@pytest.mark.skipif(why_not() is not None, reason=f"there are no boxes here: {why_not()}")
def test_the_reward_of_harbor_tasks_rises(tmp_path: Path, problems: Path) -> None:
    tasks, rows = tmp_path / "tasks", tmp_path / "rows.jsonl"
    said(sys.executable, "examples/harbor/make_tasks.py", str(problems), str(tasks))
    assert said(sys.executable, "-m", "flotilla.agents", "harbor-rows", str(tasks), str(rows)) == "200 rows\n"
    harness = ("--harness", f"python3 {HARNESS}/harness.py", "--readable", str(HARNESS), "--parallel", "16")

    learn(tmp_path, "examples/harbor/experiment.yaml", rows, sys.executable, ("harbor", str(tasks), *harness))


def test_the_reward_of_a_nemo_gym_server_rises(tmp_path: Path, problems: Path) -> None:
    data, rows = tmp_path / "data.jsonl", tmp_path / "rows.jsonl"
    said(sys.executable, "examples/nemo_gym/server.py", "--rows", str(problems), str(data))
    assert said(sys.executable, "-m", "flotilla.agents", "nemo-gym-rows", str(data), str(rows)) == "2000 rows\n"

    with a_real_server() as url:
        agent = ("nemo-gym", url, "--parallel", "32")
        learn(tmp_path, "examples/nemo_gym/experiment.yaml", rows, sys.executable, agent)
