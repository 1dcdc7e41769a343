"""A fifth of the episodes that agents begin is lost to infrastructure: played again, counted, and in no mean."""

from typing import Any

import httpx
import pytest

from flotilla.agents.episodes import Episode, EpisodeLost, Play, Verdict
from tests.agent_fleet import agent_fleet, play_rows
from tests.unit.rollout.agents.world import a_spec

NUM_ROWS, SIZE = 15, 4
ROWS = [{"prompt": [{"role": "user", "content": f"{number}?"}]} for number in range(NUM_ROWS)]


def reward_of(task: Any) -> float:
    """Give each member of each group a reward of its own."""
    return float(task["group_id"]) / 7.0 - float(task["index"]) / 3.0


def playing(client: httpx.AsyncClient, begun: list[str], lost: list[str], *, is_sound: bool) -> Play:
    """Make an agent that answers once; the machines of every fifth episode that is begun fail it after that."""

    async def play(episode: Episode) -> Verdict:
        begun.append(episode.id)
        fails = not is_sound and len(begun) % 5 == 0
        body = {"messages": [{"role": "user", "content": "?"}]}
        headers = {"Authorization": f"Bearer {episode.key}"}
        answer = await client.post(f"{episode.base_url}/chat/completions", json=body, headers=headers)
        # Where the machine is so busy that the lease has ended, the episode is lost, too.
        if fails or answer.status_code != 200:
            lost.append(episode.id)
            raise EpisodeLost("503: the server is restarted")
        return Verdict(reward_of(episode.task))

    return play


async def run(*, is_sound: bool) -> tuple[list[list[float | None]], dict[str, int], list[str]]:
    """Play all rows; return the rewards, what became of episodes, and which were lost."""
    spec, lost = a_spec(group_size=SIZE, lease_seconds=2.0, max_attempts=100), list[str]()
    async with agent_fleet(spec) as fleet, httpx.AsyncClient(trust_env=False) as client:
        rewards = await play_rows(fleet, playing(client, [], lost, is_sound=is_sound), ROWS)
        return rewards, fleet.counts(), lost


def mean_of(rewards: list[list[float | None]]) -> float:
    given = [each for group in rewards for each in group if each is not None]
    assert len(given) == NUM_ROWS * SIZE
    return sum(given) / len(given)


async def test_reward_means_with_a_fifth_lost_are_those_of_the_run_without() -> None:
    sound, untroubled, none = await run(is_sound=True)
    troubled, counts, lost = await run(is_sound=False)

    assert untroubled["episodes_abandoned"] == len(none) < len(lost)
    assert len(lost) == counts["episodes_abandoned"] >= counts["episodes_opened"] // 5 >= NUM_ROWS * SIZE // 5
    assert counts["episodes_completed"] == untroubled["episodes_completed"] == NUM_ROWS * SIZE
    assert mean_of(troubled) == pytest.approx(mean_of(sound), abs=1e-9, rel=0)
    for with_failures, without in zip(troubled, sound, strict=True):
        assert with_failures == pytest.approx(without, abs=1e-9, rel=0)
