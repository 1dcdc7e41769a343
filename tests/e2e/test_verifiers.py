"""The real `verifiers` package drives a training run of a whole fleet, and its reward rises.

It wants versions of its own of much that is installed here, so it has an interpreter of its own:
FLOTILLA_VERIFIERS_PYTHON, or one that is made here from the package index.
"""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

from tests.e2e.test_agents import rewards_of, typed
from tests.fleet import ROOT, running_fleet

NUM_STEPS = 20
EXAMPLE = "examples/verifiers"
PREPARED = "examples/arithmetic/prepared/standard-0"

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]


def interpreter_with_verifiers(folder: Path) -> str:
    """Find or make the interpreter that has the package."""
    if found := os.environ.get("FLOTILLA_VERIFIERS_PYTHON"):
        return found
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=600)
    python = str(folder / "bin" / "python")
    done = subprocess.run([python, "-m", "pip", "install", "-q", "verifiers<0.2"], capture_output=True, timeout=600)
    if done.returncode:
        pytest.skip(f"verifiers cannot be installed: {done.stderr[-500:].decode(errors='replace')}")
    return python


@pytest.fixture(scope="module")
def verifiers(tmp_path_factory: pytest.TempPathFactory) -> str:
    return interpreter_with_verifiers(tmp_path_factory.mktemp("verifiers"))


def test_the_reward_of_a_verifiers_environment_rises(tmp_path: Path, verifiers: str) -> None:
    prepare = [sys.executable, "examples/arithmetic/prepare.py", "--preset", "standard", "--seed", "0"]
    if not (ROOT / PREPARED).is_dir():
        subprocess.run([*prepare, "--output", PREPARED], cwd=ROOT, check=True, timeout=600)
    options = ("--options", json.dumps({"path": f"{PREPARED}/train.jsonl"}))

    def ask(*words: str, token: str = "", url: str = "") -> str:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "FLOTILLA_TOKEN": token, "FLOTILLA_GATEWAY_URL": url}
        command = [verifiers, "-m", "flotilla.agents", *words, *options]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    async def run() -> None:
        rows = tmp_path / "rows.jsonl"
        assert ask("verifiers-rows", f"{EXAMPLE}/arithmetic_env.py", str(rows)) == "2000 rows\n"
        with running_fleet(tmp_path) as fleet:
            sets = [f"optimisation.steps={NUM_STEPS}", f"data.path={rows}"]
            words = [word for each in sets for word in ("--set", each)]
            start = ("start", f"{EXAMPLE}/experiment.yaml", *words, "--json")
            experiment = json.loads(typed(fleet, "-m", "flotilla", *start))["id"]
            played = ("verifiers", f"{EXAMPLE}/arithmetic_env.py", experiment, "--parallel", "32")
            said = await asyncio.to_thread(ask, *played, token=fleet.token, url=fleet.url)
            async with fleet.client() as client:
                rewards = await rewards_of(client, experiment)
                ledger = await client.call("GET", f"/v1/experiments/{experiment}/ledger")
        print(said, rewards)
        assert len(rewards) == NUM_STEPS
        assert mean(rewards[-4:]) > mean(rewards[:4]) + 0.15, rewards
        assert ledger["train"]["balanced"]

    asyncio.run(run())
