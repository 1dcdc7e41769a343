"""The example agents in Node and in curl, as they lie in the examples, against a gateway and a rollout."""

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from flotilla.services.reward.grading import grading_samples
from flotilla.services.reward.verifiers.given import AgentVerifier
from flotilla.shared.schemas.trajectory import Group
from tests.agent_fleet import EXPERIMENT, TOKEN, AgentFleet, agent_fleet
from tests.fleet import ROOT
from tests.integration.gateway.test_agents import text_of
from tests.unit.rollout.agents.world import a_spec

pytestmark = pytest.mark.slow

AGENTS = ROOT / "examples" / "agent"
EPISODES = 6


def solved(prompt: str) -> str:
    """Answer the task of the fleet's tests."""
    number = int(prompt.rpartition("What is ")[2].split()[0])
    return f"It is #### {number + 1}~"


async def said_by(fleet: AgentFleet, *command: str, folder: Path) -> str:
    """Run an agent to its end."""
    environment = {**os.environ, "FLOTILLA_TOKEN": TOKEN, "FLOTILLA_GATEWAY_URL": fleet.url}
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(120):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    text = output.decode()
    assert process.returncode == 0, text
    return text


async def rewards_of(fleet: AgentFleet, groups: list[Group]) -> list[float | None]:
    """Grade groups as the reward service does."""
    verifier = AgentVerifier(fleet.plane.mailbox)
    return [grade.reward for group in groups for grade in await verifier.score(grading_samples(group))]


async def test_the_agent_of_curl_plays_an_episode(tmp_path: Path) -> None:
    if not (shutil.which("curl") and shutil.which("jq")):
        pytest.skip("curl or jq is absent")
    async with agent_fleet(a_spec(group_size=1), solved) as fleet:
        await fleet.issue(1)

        said = await said_by(fleet, "sh", str(AGENTS / "agent.sh"), EXPERIMENT, folder=tmp_path)

        await fleet.until(lambda ledger: ledger.waiting.generated == 1)
        (group,) = await fleet.groups()
        rewards = await rewards_of(fleet, [group])
    assert "It is #### 1" in said
    (trajectory,) = group.trajectories
    assert text_of(trajectory, sampled=True) == "It is #### 1~"
    assert rewards == [1.0]


@pytest.mark.long
async def test_the_agent_of_node_plays_until_the_experiment_ends(tmp_path: Path) -> None:
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node or npm is absent")
    installing = ["npm", "install", "--no-audit", "--no-fund", "openai"]
    done = await asyncio.to_thread(
        subprocess.run, installing, cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    if done.returncode:
        pytest.skip(f"the package openai cannot be installed: {done.stderr[-300:]}")
    shutil.copy(AGENTS / "agent.mjs", tmp_path)
    async with agent_fleet(a_spec(group_size=2), solved) as fleet:
        await fleet.issue(EPISODES // 2)
        playing = asyncio.create_task(said_by(fleet, "node", "agent.mjs", EXPERIMENT, folder=tmp_path))
        waiting = asyncio.create_task(fleet.until(lambda ledger: ledger.waiting.generated == EPISODES // 2, 60.0))
        await asyncio.wait([playing, waiting], return_when=asyncio.FIRST_COMPLETED)
        assert not playing.done(), playing.result()
        await waiting
        # An experiment that has ended, however it did, has no more episodes.
        await fleet.gateway.commands.fail(fleet.gateway.repository.get(EXPERIMENT), "test", "it is over")

        said = await playing
        rewards = await rewards_of(fleet, await fleet.groups())

    assert said.strip().endswith(f"{EPISODES} episodes")
    assert rewards == [1.0] * EPISODES
