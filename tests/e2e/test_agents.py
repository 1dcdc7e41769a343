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

from shared.client import GatewayClient
from tests.fleet import ROOT, running_fleet

NUM_STEPS = 20

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


async def begun(client: GatewayClient) -> str:
    printed = subprocess.run(
        [sys.executable, "-m", "flotilla", "prepare", "examples/agent/experiment.yaml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=True,
    )
    spec = json.loads(printed.stdout)
    spec["optimisation"]["steps"] = NUM_STEPS
    created = await client.call("POST", "/v1/experiments", body=spec, deadline_seconds=60)
    await client.call("POST", f"/v1/experiments/{created['id']}/start", deadline_seconds=60)
    return str(created["id"])


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
            async with fleet.client() as client:
                experiment = await begun(client)
                agents = await asyncio.to_thread(
                    subprocess.run,
                    [sys.executable, "examples/agent/agent.py", experiment, "--parallel", "32"],
                    cwd=ROOT,
                    env={
                        **os.environ,
                        "FLOTILLA_TOKEN": client.token or "",
                        "FLOTILLA_GATEWAY_URL": client.base_url,
                    },
                    capture_output=True,
                    text=True,
                    timeout=700,
                )
                assert agents.returncode == 0, agents.stdout + agents.stderr
                rewards = await rewards_of(client, experiment)
                ledger = await client.call("GET", f"/v1/experiments/{experiment}/ledger")
        assert len(rewards) == NUM_STEPS
        assert mean(rewards[-4:]) > mean(rewards[:4]) + 0.15, rewards
        assert ledger["train"]["balanced"]

    asyncio.run(run())
