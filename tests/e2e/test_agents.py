"""Agents with the real OpenAI client drive a training run of a whole fleet, and their reward rises."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from flotilla.shared.net.client.client import GatewayClient
from tests.fleet import ROOT, RunningFleet, running_fleet

NUM_STEPS = 20

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def typed(fleet: RunningFleet, *words: str) -> str:
    """Type a command of the example's page."""
    environment = {**os.environ, "FLOTILLA_TOKEN": fleet.token, "FLOTILLA_GATEWAY_URL": fleet.url}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=700, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


async def rewards_of(client: GatewayClient, experiment: str) -> list[float]:
    found: dict[int, float] = {}
    after: Any = None
    while True:
        params = {"limit": 1000, "after": after}
        page = await client.call("GET", f"/v1/experiments/{experiment}/metrics", params=params)
        found |= {each["step"]: each["value"] for each in page["items"] if each["name"] == "reward/mean"}
        after = page.get("next")
        if not after:
            return [found[step] for step in sorted(found)]


def test_the_reward_of_agents_with_the_openai_client_rises(tmp_path: Path) -> None:
    async def run() -> None:
        with running_fleet(tmp_path) as fleet:
            start = ("start", "examples/agent/experiment.yaml", "--set", f"optimisation.steps={NUM_STEPS}", "--json")
            experiment = json.loads(typed(fleet, "-m", "flotilla", *start))["id"]
            typed(fleet, "examples/agent/agent.py", experiment, "--parallel", "32")
            async with fleet.client() as client:
                rewards = await rewards_of(client, experiment)
                ledger = await client.call("GET", f"/v1/experiments/{experiment}/ledger")
        assert len(rewards) == NUM_STEPS
        assert mean(rewards[-4:]) > mean(rewards[:4]) + 0.15, rewards
        assert ledger["train"]["balanced"]

    asyncio.run(run())
