"""What the trainer gets of a graded group: filtered, shaped and masked, by the rewards as graded."""

from typing import Any

import pytest
from pydantic import ValidationError

from flotilla.services.reward.decision import for_training, why_filtered
from flotilla.services.reward.grading import with_grades
from flotilla.services.reward.verifiers.base import Grade
from flotilla.shared.config.sections.reward import RewardConfig
from flotilla.shared.schemas.trajectory import FinishReason, GradeStatus, Group
from flotilla.shared.testing.builders import a_task, a_trajectory


def config(**sections: Any) -> RewardConfig:
    return RewardConfig.model_validate(sections)


def graded(*rewards: float | None, lengths: tuple[int, ...] = (5, 5)) -> Group:
    made = [
        a_trajectory(
            sampled_tokens=length, reward=reward, finish_reason=FinishReason.LENGTH if length > 8 else FinishReason.STOP
        )
        for reward, length in zip(rewards, lengths, strict=True)
    ]
    return Group(a_task(), tuple(made))


def test_rewards_are_shaped_and_the_verdict_is_kept() -> None:
    group = graded(1.0, 1.0, lengths=(5, 10))

    found = for_training(group, config(shaping={"overlong": {"max_length": 10, "buffer": 4}}))

    assert [t.reward for t in found.trajectories] == [1.0, 0.0]
    assert [t.components["unshaped"] for t in found.trajectories] == [1.0, 1.0]


def test_what_was_not_graded_gets_no_reward_by_shaping() -> None:
    found = for_training(graded(1.0, None), config(shaping={"scale": 2.0}))

    assert [t.reward for t in found.trajectories] == [2.0, None]
    assert found.trajectories[1].status is GradeStatus.PENDING


def test_masked_trajectories_keep_their_rewards_but_not_their_tokens() -> None:
    group = graded(1.0, 0.0, lengths=(5, 10))

    found = for_training(group, config(sample_mask={"truncated": True, "max_length": 10}, shaping={"scale": 3.0}))

    assert [t.num_sampled for t in found.trajectories] == [5, 0]
    assert [t.reward for t in found.trajectories] == [3.0, 0.0]
    assert not found.trajectories[1].log_probs.any()


@pytest.mark.parametrize(
    ("rewards", "reason"), [((1.0, 1.0), "mean_in_range"), ((0.0, 1.0), None), ((0.0, 0.0), "mean_in_range")]
)
def test_the_filter_judges_the_rewards_as_graded(rewards: tuple[float, float], reason: str | None) -> None:
    section = config(group_filter={"kind": "mean_in_range"}, shaping={"scale": 0.5})

    assert why_filtered(graded(*rewards), section) == reason


def beside_greedy(greedy: float, *rewards: float) -> Group:
    members = [a_trajectory(reward=reward) for reward in rewards]
    return Group(a_task(), (*members, a_trajectory(reward=greedy, is_baseline=True)))


@pytest.mark.parametrize(
    ("section", "greedy", "rewards", "reason"),
    [
        ({"filter_zero_spread": True}, 1.0, (0.0, 0.0), None),
        ({"filter_zero_spread": True}, 0.0, (0.0, 0.0), "zero_spread"),
        ({"filter_zero_spread": True}, 0.0, (0.0,), "zero_spread"),
        ({"filter_zero_spread": True}, 0.0, (0.0, 1.0), None),
        ({"group_filter": {"kind": "spread_above"}}, 1.0, (0.0, 0.0), None),
        ({"group_filter": {"kind": "spread_above"}}, 0.0, (0.0, 0.0), "spread_above"),
        ({"group_filter": {"kind": "mean_in_range"}}, 1.0, (0.0, 0.0), "mean_in_range"),
        ({"group_filter": {"kind": "mean_in_range"}}, 1.0, (0.0, 1.0), None),
    ],
)
def test_a_greedy_answer_counts_in_a_spread_and_not_in_a_mean(
    section: dict[str, Any], greedy: float, rewards: tuple[float, ...], reason: str | None
) -> None:
    assert why_filtered(beside_greedy(greedy, *rewards), config(**section)) == reason


def test_a_greedy_answer_takes_part_in_what_its_group_is_normalised_by() -> None:
    section = config(shaping={"normalisation": {"mean": "group", "std": "group"}})

    found = [t.reward for t in for_training(beside_greedy(1.0, 0.0, 0.0, 0.0), section).trajectories]

    # Members alone have a deviation of 0, and the greedy answer would be a million of their epsilons away.
    assert found == pytest.approx([-0.5, -0.5, -0.5, 1.5], rel=1e-4)


def test_episodes_of_equal_rewards_have_no_spread_whatever_branches_they_have() -> None:
    branches = [(0, 3), (1, 1), (2, 2)]
    made = [a_trajectory(reward=0.7, episode=episode) for episode, count in branches for _ in range(count)]

    assert why_filtered(Group(a_task(), tuple(made)), config(filter_zero_spread=True)) == "zero_spread"


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ([{"remote/score": 0.0}, {"remote/score": 1.0}], None),
        ([{"remote/score": 1.0}, {"remote/score": 1.0}], "mean_in_range"),
        ([{}, {}], "mean_in_range"),
        ([{"remote/score": 0.5}, {"remote/other": 0.5}], "mean_in_range"),
    ],
)
def test_a_filter_that_names_a_metric_judges_it_and_not_the_reward(
    metrics: list[dict[str, float]], reason: str | None
) -> None:
    section = config(
        components=[{"kind": "remote", "url": "http://grader:1"}],
        group_filter={"kind": "mean_in_range", "metric": "remote/score"},
    )
    grades = [Grade.scored(2.0, components={"remote": 2.0}, metrics=found) for found in metrics]

    group = with_grades(graded(None, None), grades, 0.1, {"remote", "remote/score"})

    assert why_filtered(group, section) == reason
    assert [t.reward for t in group.trajectories] == [2.0, 2.0]


@pytest.mark.parametrize(
    "section",
    [
        {"group_filter": {"kind": "mean_in_range", "metric": "nobody/score"}},
        {"group_filter": {"kind": "spread_above", "metric": "score"}},
        {"shaping": {"normalisation": {"mean": "batch"}}},
        {"shaping": {"normalisation": {"mean": "group", "std": "running"}}},
        {"shaping": {"normalisation": {"mean": "group", "grouping": "inductive"}}},
        {"filter_zero_spread": True, "group_filter": {"kind": "spread_above"}},
    ],
)
def test_what_a_single_group_cannot_give_is_refused(section: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        config(**section)
