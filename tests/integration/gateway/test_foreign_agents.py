"""Agents that were written for other frameworks, played against a gateway and rollouts behind sockets."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from flotilla.agents.episodes import Episode, EpisodeLost, Verdict, play_all
from flotilla.agents.openrlhf import OpenRlhfAgent, load_agent
from flotilla.agents.rows import write_rows
from flotilla.agents.verifiers import VerifiersAgent, new_client, rows_of
from flotilla.shared.errors import InvalidSpec
from flotilla.shared.schemas.task import Lane
from flotilla.shared.schemas.trajectory import FinishReason
from flotilla.shared.testing.characters import END
from tests.agent_fleet import EXPERIMENT, TOKEN, agent_fleet
from tests.unit.rollout.agents.world import a_spec

OPENRLHF = """
import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    def __init__(self):
        self.turn = 0
    async def reset(self, states):
        return {"observation": states["observation"] + states["label"]}
    async def step(self, states):
        self.turn += 1
        done = self.turn == 3
        return {"rewards": torch.tensor(0.5), "scores": torch.tensor(float(done)), "done": done,
                "environment_feedback": "" if done else f"[{states['action_text']} was turn {self.turn}]",
                "sampling_params": states.get("sampling_params"), "extra_logs": {"turns": torch.tensor(self.turn)}}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


class Enough(Exception):
    """As many episodes as the test wants."""


async def test_openrlhfs_agent_adds_its_rewards_and_its_feedback_is_context(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(OPENRLHF)
    verdicts: list[Verdict] = []

    async with agent_fleet(a_spec(group_size=2), lambda _: "yes~") as fleet, httpx.AsyncClient(timeout=30) as client:
        agent = OpenRlhfAgent(load_agent(tmp_path / "agent.py"), client)
        await fleet.issue(3)

        async def play(episode: Episode) -> Verdict:
            if len(verdicts) == 4:
                raise Enough
            verdicts.append(await agent(episode))
            return verdicts[-1]

        with pytest.raises(ExceptionGroup) as ended:
            await play_all(fleet.url, EXPERIMENT, TOKEN, play, parallel=1)
        groups = await fleet.groups()

    assert ended.group_contains(Enough)
    assert verdicts == [Verdict(1.5, {"turns": 3.0, "score": 1.0})] * 4
    assert len(groups) == 2
    for trajectory in (each for group in groups for each in group.trajectories):
        text = "".join(map(chr, trajectory.token_ids)).replace(chr(END), "~")
        sampled = "".join(map(chr, trajectory.token_ids[trajectory.loss_mask == 1])).replace(chr(END), "~")
        assert text.endswith("yes~[yes was turn 1]yes~[yes was turn 2]yes~")
        assert sampled == "yes~yes~yes~"
        assert trajectory.finish_reason is FinishReason.STOP


async def test_an_agent_whose_room_is_used_up_keeps_what_it_has(tmp_path: Path) -> None:
    endless = OPENRLHF.replace("self.turn == 3", "False")
    (tmp_path / "agent.py").write_text(endless)
    verdicts: list[Verdict] = []

    async with agent_fleet(a_spec(max_turns=2), lambda _: "yes~") as fleet, httpx.AsyncClient(timeout=30) as client:
        agent = OpenRlhfAgent(load_agent(tmp_path / "agent.py"), client)
        await fleet.issue(1)

        async def play(episode: Episode) -> Verdict:
            verdicts.append(await agent(episode))
            raise Enough

        with pytest.raises(ExceptionGroup):
            await play_all(fleet.url, EXPERIMENT, TOKEN, play, parallel=1)

    assert [verdict.reward for verdict in verdicts] == [1.0]


async def test_an_episode_that_is_given_up_is_handed_out_again(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    async with agent_fleet(a_spec(group_size=1, lease_seconds=1.0), lambda _: "yes~") as fleet:
        await fleet.issue(1)

        async def play(episode: Episode) -> Verdict:
            seen.append((episode.task["group_id"], episode.task["index"]))
            if len(seen) == 2:
                raise Enough
            raise EpisodeLost("not now")

        with pytest.raises(ExceptionGroup):
            await play_all(fleet.url, EXPERIMENT, TOKEN, play, parallel=1)

    assert seen == [(0, 0), (0, 0)]


@pytest.mark.parametrize(
    "code",
    ["x = 1", "class AgentExecutor:\n    async def execute(self, prompt): ...\n", "class AgentInstance: ...\n"],
)
def test_a_file_without_an_agent_is_refused_in_a_sentence(tmp_path: Path, code: str) -> None:
    (tmp_path / "agent.py").write_text(code)

    with pytest.raises(InvalidSpec, match="no class AgentInstance with reset and step"):
        load_agent(tmp_path / "agent.py")


class HoldsOut:
    """What is asked of an environment of verifiers for its rows."""

    def get_dataset(self) -> list[dict[str, Any]]:
        return [{"example_id": 0, "prompt": "train", "answer": "1"}]

    def get_eval_dataset(self) -> list[dict[str, Any]]:
        return [{"example_id": 0, "prompt": "held out", "answer": "2"}]


def test_held_out_rows_of_verifiers_are_told_from_those_of_training(tmp_path: Path) -> None:
    environment = HoldsOut()
    write_rows(rows_of(environment), tmp_path / "train.jsonl")
    write_rows(rows_of(environment, Lane.EVALUATION), tmp_path / "held_out.jsonl")
    agent = VerifiersAgent(environment, new_client("http://nowhere"))

    for name, split in (("train", "train"), ("held_out", "evaluation")):
        written = json.loads((tmp_path / f"{name}.jsonl").read_text())
        row = agent.row_of({"split": split, "metadata": {"example_id": written["example_id"]}})
        assert (row["answer"], written["prompt"][0]["content"]) == (written["answer"], name.replace("_", " "))


class Rollouts(HoldsOut):
    """An environment of verifiers that only looks at the client it is given."""

    def __init__(self) -> None:
        self.clients: list[AsyncOpenAI] = []

    async def run_rollout(self, row: Any, client: AsyncOpenAI, model: str, sampling_args: Any) -> dict[str, Any]:
        self.clients.append(client)
        return {"reward": 1.0}


async def test_episodes_of_verifiers_share_connections_and_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("verifiers.clients")
    package.OpenAIChatCompletionsClient = lambda client: client  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verifiers", ModuleType("verifiers"))
    monkeypatch.setitem(sys.modules, "verifiers.clients", package)
    environment = Rollouts()
    task = {"split": "train", "metadata": {"example_id": 0}}

    async with new_client("http://gateway") as client:
        agent = VerifiersAgent(environment, client)
        for name in ("a", "b"):
            await agent(Episode(name, f"key-{name}", f"http://gateway/{name}/v1", "m", task))

        assert [each.api_key for each in environment.clients] == ["key-a", "key-b"]
        assert [each.base_url.path for each in environment.clients] == ["/a/v1/", "/b/v1/"]
        assert {id(each._client) for each in environment.clients} == {id(client._client)}
        assert not client.is_closed()
