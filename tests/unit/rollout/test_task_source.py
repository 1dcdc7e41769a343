"""How much of which lane a rollout takes."""

from typing import Any

from redis.asyncio import Redis

from flotilla.services.rollout.consumer import LaneConfig
from flotilla.services.rollout.task_source import TaskSource
from flotilla.shared.streams.hop import StreamsConfig
from tests.unit.gateway.builders import a_spec


def lanes_of(**sections: Any) -> dict[str, LaneConfig]:
    source = TaskSource(Redis(), "rollout", StreamsConfig())
    return {config.name: config for config, _ in source.lanes(a_spec(**sections), "e")}


def test_a_quarter_more_samples_than_slots_are_in_work() -> None:
    rollout = {"group_size": 4, "engine": {"slots": 16}}

    assert lanes_of(rollout=rollout)["train"].max_groups == 5


def test_the_evaluation_has_a_lane_where_there_is_one() -> None:
    evaluation = {"path": "/heldout.jsonl", "every_versions": 1, "group_size": 2, "greedy": False}

    assert set(lanes_of()) == {"train"}
    assert set(lanes_of(evaluation=evaluation)) == {"train", "evaluation"}


def test_tasks_of_agents_end_by_the_times_of_their_episodes() -> None:
    agents = {"rollout": {"group_size": 4, "agents": {}}, "reward": {"components": [{"kind": "agent"}]}}

    assert lanes_of()["train"].task_seconds is not None
    assert lanes_of(**agents)["train"].task_seconds is None


def test_redundant_groups_are_ended_when_they_are_too_old() -> None:
    asynchrony = {"redundant_groups": 2, "on_max_lag": "drop", "max_lag": 3}

    assert lanes_of()["train"].max_lag is None
    assert lanes_of(asynchrony=asynchrony)["train"].max_lag == 3
