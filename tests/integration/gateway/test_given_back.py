"""An agent's process that dies: its successor has its episodes at once, and what it left behind is refused."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.agent_fleet import EXPERIMENT, TOKEN, AgentFleet, agent_fleet
from tests.unit.rollout.agents.world import a_spec

OPENRLHF = """
import asyncio
from pathlib import Path
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    async def reset(self, states):
        return {"observation": states["observation"]}
    async def step(self, states):
        while Path(HOLD).exists():
            await asyncio.sleep(0.05)
        return {"rewards": 0.5, "scores": 0.5, "done": True, "environment_feedback": ""}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""
LEASE_SECONDS = 3600.0


@asynccontextmanager
async def an_agent(fleet: AgentFleet, folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    environment = os.environ | {"FLOTILLA_TOKEN": TOKEN, "TMPDIR": str(folder)}
    command = [sys.executable, "-m", "flotilla.agents", "openrlhf", str(folder / "agent.py"), EXPERIMENT]
    command += ["--gateway", fleet.url, "--parallel", "4"]
    process = await asyncio.create_subprocess_exec(*command, env=environment)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def until_open(fleet: AgentFleet, number: int) -> None:
    async with asyncio.timeout(60.0):
        while fleet.counts()["episodes_open"] != number:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_the_successor_of_an_agent_that_died_has_its_episodes_at_once(how: int, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    (tmp_path / "agent.py").write_text(f"HOLD = {str(hold)!r}\n{OPENRLHF}")
    spec = a_spec(group_size=2, lease_seconds=LEASE_SECONDS)
    async with agent_fleet(spec, lambda _: "yes~", num_rollouts=2, max_groups=1) as fleet:
        await fleet.issue(2)
        async with an_agent(fleet, tmp_path) as first:
            await until_open(fleet, 4)
            first.send_signal(how)
            await first.wait()
        hold.unlink()
        died = time.monotonic()
        async with an_agent(fleet, tmp_path):
            await fleet.until(lambda ledger: ledger.waiting.generated == 2, 60.0)
        took, counts, groups = time.monotonic() - died, fleet.counts(), await fleet.groups()

    assert took < 60.0 < LEASE_SECONDS
    assert (counts["episodes_opened"], counts["episodes_completed"], counts["episodes_abandoned"]) == (8, 4, 4)
    assert [len(group.trajectories) for group in groups] == [2, 2]
    assert len({each.episode for group in groups for each in group.trajectories}) == 4, "nothing is trained twice"


async def post(fleet: AgentFleet, http: httpx.AsyncClient, path: str, token: str, body: Any) -> httpx.Response:
    return await http.post(f"{fleet.url}/v1/{path}", json=body, headers={"Authorization": f"Bearer {token}"})


async def test_what_a_dead_agent_started_is_refused_with_a_sentence() -> None:
    spec = a_spec(group_size=2, lease_seconds=LEASE_SECONDS)
    async with agent_fleet(spec, lambda _: "yes~", num_rollouts=2) as fleet, httpx.AsyncClient(timeout=30) as http:
        await fleet.issue(1)
        episodes, holder = f"experiments/{EXPERIMENT}/episodes", {"holder": "one-that-will-have-ended"}
        held = (await post(fleet, http, episodes, TOKEN, {"wait_seconds": 10, **holder})).json()
        of_its_own_key = await post(fleet, http, f"{episodes}/give-back", held["key"], holder)
        given = await post(fleet, http, f"{episodes}/give-back", TOKEN, holder)
        chat = {"model": "m", "messages": [{"role": "user", "content": "a?"}]}
        late = await post(fleet, http, "chat/completions", held["key"], chat)
        end = await post(fleet, http, f"episodes/{held['episode_id']}/complete", held["key"], {"reward": 1.0})
        again = await post(fleet, http, episodes, TOKEN, {"wait_seconds": 0, **holder})
        other = await post(fleet, http, episodes, TOKEN, {"wait_seconds": 5, "holder": "one-that-goes-on-playing"})
        unnamed = await post(fleet, http, f"{episodes}/give-back", TOKEN, {"holder": "?"})

    assert of_its_own_key.status_code == 403
    assert (given.status_code, given.json()) == (200, {"episode_ids": [held["episode_id"]]})
    assert (late.status_code, end.status_code, again.status_code) == (410, 410, 410)
    assert "was given back, since who had begun it has ended: another agent plays it" in late.text
    assert "was given back" in end.text and "it gets no other one" in again.text
    assert (other.status_code, unnamed.status_code) == (201, 422)
