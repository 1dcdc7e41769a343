"""Each row of the agents' table plays episodes over an update: every token has its version and a seed of its own."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from flotilla.services.reward.consumer import RewardConsumer, RewardLane
from flotilla.services.reward.verifiers.given import AgentVerifier
from flotilla.services.rollout.engines.base import Completion, GenerationRequest
from flotilla.services.rollout.engines.scripted import log_prob_of
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.schemas.trajectory import Group, Trajectory
from flotilla.shared.streams.hop import HopName
from flotilla.shared.testing.characters import END
from tests.agent_fleet import EXPERIMENT, TOKEN, AgentFleet, agent_fleet
from tests.pairs.covering import Row, covering_rows
from tests.pairs.documents import changes_of, document_of
from tests.pairs.table import AGENTS
from tests.unit.rollout.agents import world

ROWS = covering_rows({name: list(values) for name, values in AGENTS.items()}, [tuple(AGENTS)])
NUM_GROUPS, NUM_TURNS, REPLY_TOKENS, TOKENS_BEFORE = 3, 2, 16, 4


def a_spec(row: Row) -> ExperimentSpec:
    dotted = {key: value for key, value in changes_of(row, AGENTS).items() if "." in key}
    usual = world.a_spec(window_seconds=60, max_new_tokens=64, max_attempts=50).model_dump(mode="json")
    changed = document_of(dotted)
    for section, keys in changed.items():
        for key, value in keys.items():
            old = usual[section][key]
            usual[section][key] = {**old, **value} if isinstance(old, dict) and key != "group_filter" else value
    return validate_spec(usual)


def token_of(prompt_ids: Sequence[int], seed: int, position: int, version: int) -> int:
    """Write letters that tell prompt, seed, place and version apart."""
    if position >= REPLY_TOKENS:
        return END
    return ord("a") + (sum(prompt_ids) + seed // 26**position + 7 * position + 11 * version) % 26


@dataclass
class Play:
    """Agents of one row, and what they asked.

    Attributes:
        asked: prompt and seed of each request that an engine was given.
        completed: episodes of each group.
    """

    row: Row
    fleet: AgentFleet
    http: httpx.AsyncClient
    asked: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    completed: Counter[str] = field(default_factory=Counter)

    def note_requests(self) -> None:
        """Note what engines are asked, and let them write what ``token_of`` says."""
        for rollout in self.fleet.rollouts:
            engine, generate = rollout.engine, rollout.engine.generate
            engine._next_token = token_of

            async def noting(request: GenerationRequest, generate: Any = generate) -> Sequence[Completion]:
                self.asked.extend((request.prompt_ids, seed) for seed in request.seeds)
                found: Sequence[Completion] = await generate(request)
                return found

            engine.generate = noting  # type: ignore[method-assign]

    async def begin(self) -> dict[str, Any] | None:
        """Begin an episode; None if there is none now."""
        headers = {"Authorization": f"Bearer {TOKEN}"}
        url = f"{self.fleet.url}/v1/experiments/{EXPERIMENT}/episodes"
        answer = await self.http.post(url, json={"wait_seconds": 0.5}, headers=headers)
        assert answer.status_code in {201, 503}, answer.text
        found: dict[str, Any] | None = answer.json() if answer.status_code == 201 else None
        return found

    async def play(self, episode: dict[str, Any]) -> None:
        """Ask in turns, each several times where the row has it so, go on with one answer, and complete."""
        headers = {"Authorization": f"Bearer {episode['key']}"}
        chat: list[Any] = [{"role": "user", "content": "?"}]
        for turn in range(NUM_TURNS):
            body, num = {"messages": chat}, changes_of(self.row, AGENTS).get("calls", 1)
            url = f"{self.fleet.url}/v1/chat/completions"
            answers = await asyncio.gather(*(self.http.post(url, json=body, headers=headers) for _ in range(num)))
            assert {each.status_code for each in answers} == {200}, [each.text for each in answers]
            replies = [each.json()["choices"][0]["message"] for each in answers]
            chat += [replies[-1], {"role": "user", "content": f"more {turn}?"}]
        ended = f"{self.fleet.url}/v1/episodes/{episode['episode_id']}/complete"
        group = episode["task"]["label"]
        reward = 1.0 if self.row["rewards"] == "are equal" else float(self.completed[group] % 2)
        self.completed[group] += 1
        assert (await self.http.post(ended, json={"reward": reward}, headers=headers)).status_code == 200

    async def play_all(self) -> None:
        """Let agents play until every group is whole, one of them vanishing where the row has it so."""
        if self.row["agents"] == "one vanishes":
            assert await self.begin() is not None
        while (await self.fleet.plane.ledger()).waiting.generated < NUM_GROUPS:
            begun = await asyncio.gather(*(self.begin() for _ in range(4)))
            await asyncio.gather(*(self.play(episode) for episode in begun if episode is not None))

    async def update(self, image: Path) -> None:
        """Load version 1 into each rollout while it samples, where the row has it so."""
        mode = changes_of(self.row, AGENTS).get("update")
        if mode is None:
            return

        while sum([(await each.engine.load()).generated_tokens for each in self.fleet.rollouts]) < TOKENS_BEFORE:
            await asyncio.sleep(0.002)

        async def updated(rollout: Any) -> None:
            await rollout.engine.load_weights(image, 1, OnWeightUpdate(mode))
            await rollout.gate.set(1)

        await asyncio.gather(*map(updated, self.fleet.rollouts))

    def check(self, group: Group) -> list[int]:
        """Read every sampled token again; returns the seeds of the group's turns."""
        seeds = []
        for trajectory in group.trajectories:
            for start, end in spans_of(trajectory):
                prompt, sampled = tuple(trajectory.token_ids[:start].tolist()), trajectory.token_ids[start:end].tolist()
                versions = [version_at(trajectory, place) for place in range(start, end)]
                could = {
                    seed for asked, seed in self.asked if asked == prompt and is_of(seed, prompt, sampled, versions)
                }
                assert len(could) == 1, (could, sampled, versions)
                assert np.allclose(trajectory.log_probs[start:end], [log_prob_of(token) for token in sampled])
                seeds += could
        return seeds


def is_of(seed: int, prompt: Sequence[int], sampled: Sequence[int], versions: Sequence[int]) -> bool:
    places = range(len(sampled))
    return [token_of(prompt, seed, place, versions[place]) for place in places] == list(sampled)


def spans_of(trajectory: Trajectory) -> list[tuple[int, int]]:
    """List where the policy wrote: from, and up to."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], trajectory.loss_mask, [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def version_at(trajectory: Trajectory, place: int) -> int:
    return max((run for run in trajectory.versions if run[0] <= place), key=lambda run: run[0])[1]


async def graded(fleet: AgentFleet, spec: ExperimentSpec) -> Any:
    """Grade all groups as the reward service does; returns the ledger afterwards."""
    lane = RewardLane("train", fleet.plane.hop(HopName.GENERATED, "reward"), is_filtered=True)
    consumer = RewardConsumer([lane], AgentVerifier(fleet.plane.mailbox), spec.reward, 4)
    consumer.resume()
    grading = asyncio.create_task(consumer.run())
    try:
        return await fleet.until(lambda each: each.waiting.generated == each.claimed.generated == 0)
    finally:
        grading.cancel()
        await asyncio.gather(grading, return_exceptions=True)


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
async def test_agents_get_whole_groups_of_tokens_with_their_versions_and_seeds(row: Row, tmp_path: Path) -> None:
    print(row)
    spec, image = a_spec(row), tmp_path / "image.safetensors"
    save_file({"w": np.zeros(1, np.float32)}, image)
    num_rollouts = 2 if row["rollouts"] == "two" else 1
    async with (
        agent_fleet(spec, num_rollouts=num_rollouts, token_seconds=0.004) as fleet,
        httpx.AsyncClient(trust_env=False, timeout=60) as http,
    ):
        play = Play(row, fleet, http)
        play.note_requests()
        await fleet.issue(NUM_GROUPS)
        async with asyncio.timeout(90):
            await asyncio.gather(play.play_all(), play.update(image))
        hop = fleet.plane.hop(HopName.GENERATED, "reader")
        claims = await hop.claim(99, wait_seconds=0)
        groups = [claim.group() for claim in claims]
        seeds = [play.check(group) for group in groups]
        for claim in claims:
            await hop.hand_back(claim)
        ledger = await graded(fleet, spec)

    size = spec.rollout.group_size
    assert [len({each.episode for each in group.trajectories}) for group in groups] == [size] * NUM_GROUPS
    num_calls = changes_of(row, AGENTS).get("calls", 1)
    for found in seeds:
        assert len(found) == len(set(found)) == size * NUM_TURNS * num_calls
    versions = {version for group in groups for each in group.trajectories for _, version in each.versions}
    assert versions == ({0} if row["update"] == "none" else {0, 1})
    is_filtered = row["filter"] != "none" and row["rewards"] == "are equal"
    assert ledger.balanced and ledger.failed == ledger.dropped == {}
    assert sum(ledger.filtered.values()) == (NUM_GROUPS if is_filtered else 0)
    assert ledger.waiting.scored == (0 if is_filtered else NUM_GROUPS)
