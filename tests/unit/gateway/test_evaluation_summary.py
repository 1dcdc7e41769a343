from itertools import combinations
from statistics import fmean

import pytest

from flotilla.services.gateway.datasets.dataset import Part
from flotilla.services.gateway.evaluation.summary import (
    best_at,
    compare_answers,
    majority,
    pass_at,
    sizes_up_to,
    summarise_sets,
)
from flotilla.shared.schemas.trajectory import GradeStatus, Group
from flotilla.shared.testing.builders import a_group, a_task, a_trajectory

REWARDS = [0.0, 1.0, 0.25, 0.0, -1.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("number", "sizes"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (10, [1, 2, 4, 8, 10])]
)
def test_sizes_are_powers_of_two_and_the_number_itself(number: int, sizes: list[int]) -> None:
    assert sizes_up_to(number) == sizes


@pytest.mark.parametrize("k", range(1, 8))
def test_estimators_are_the_means_over_all_draws(k: int) -> None:
    draws = list(combinations(REWARDS, k))

    assert best_at(REWARDS, k) == pytest.approx(fmean(max(draw) for draw in draws))
    assert pass_at(2, 7, k) == pytest.approx(fmean(max(draw) >= 1 for draw in draws))


def test_the_best_of_all_is_the_largest() -> None:
    """verl's draws with replacement give .687 here."""
    assert best_at([1.0, 0.0, 0.0, 0.0], 4) == 1.0
    assert best_at([1.0, 0.0, 0.0, 0.0], 1) == 0.25


@pytest.mark.parametrize("k", [0, 8])
def test_more_than_there_are_cannot_be_drawn(k: int) -> None:
    with pytest.raises(ValueError, match="between 1 and 7"):
        best_at(REWARDS, k)
    with pytest.raises(ValueError, match="between 1 and 7"):
        pass_at(1, 7, k)


@pytest.mark.parametrize(
    ("answers", "reward"),
    [
        (["a", "b", "b", "c"], 1.0),
        (["a", "b", "c", "d"], 0.0),
        (["a", None, None, "b"], 1.0),
        (["b", "b", "a", "a"], 0.0),
    ],
)
def test_the_majority_has_the_reward_of_its_first_sample(answers: list[str | None], reward: float) -> None:
    assert majority([0.0, 1.0, 1.0, 0.0], answers) == reward


def voted(row: int, rewards: list[float | None], answers: list[str | None], **task: object) -> Group:
    members = tuple(
        a_trajectory().graded(GradeStatus.ERROR, None, reason="no")
        if reward is None
        else a_trajectory().graded(GradeStatus.SCORED, reward, answer=answer)
        for reward, answer in zip(rewards, answers, strict=True)
    )
    return Group(a_task(row, group_size=len(members), **task), members)


def test_several_answers_are_compared() -> None:
    groups = [
        voted(0, [1.0, 0.0, 0.0, 1.0], ["7", "8", "9", "7"]),
        voted(1, [0.0, 0.0, 0.0, 0.0], ["1", "1", None, "2"]),
        voted(2, [1.0, None, 1.0, None], ["3", None, "3", None]),
        voted(3, [None] * 4, [None] * 4),
    ]

    found = compare_answers(groups, num_answers=4, pass_reward=1.0)

    assert found == {
        "evaluation/pass@1": pytest.approx((0.5 + 0 + 1) / 3),
        "evaluation/pass@2": pytest.approx((5 / 6 + 0 + 1) / 3),
        "evaluation/best@2": pytest.approx((5 / 6 + 0 + 1) / 3),
        "evaluation/pass@4": pytest.approx((1 + 0) / 2),
        "evaluation/best@4": pytest.approx((1 + 0) / 2),
        "evaluation/mean@4": pytest.approx((0.5 + 0 + 1) / 3),
        "evaluation/maj@4": pytest.approx((1 + 0 + 1) / 3),
    }


def test_what_passes_is_what_the_spec_says() -> None:
    groups = [a_group(a_task(0), rewards=[0.5, 0.2])]

    assert compare_answers(groups, num_answers=2, pass_reward=1.0)["evaluation/pass@2"] == 0.0
    assert compare_answers(groups, num_answers=2, pass_reward=0.5)["evaluation/pass@2"] == 1.0


def test_nobody_votes_where_no_grader_names_answers() -> None:
    found = compare_answers([a_group(a_task(0), rewards=[1.0, 0.0])], num_answers=2, pass_reward=1.0)

    assert "evaluation/maj@2" not in found
    assert compare_answers([], num_answers=2, pass_reward=1.0) == {}


def test_sets_and_data_sources_have_their_own() -> None:
    groups = [
        voted(0, [1.0, 0.0], ["7", "8"], data_source="easy"),
        voted(1, [0.0, 0.0], ["7", "8"], data_source="very hard"),
    ]
    parts = [Part(0, 1, "first"), Part(1, 1, "second")]

    found = summarise_sets(groups, parts, num_issued=2, num_answers=2, pass_reward=1.0)

    assert found["evaluation/pass@2"] == 0.5
    assert (found["evaluation/first/pass@2"], found["evaluation/second/pass@2"]) == (1.0, 0.0)
    assert (found["evaluation/source/easy/pass@2"], found["evaluation/source/very_hard/pass@2"]) == (1.0, 0.0)
    assert found["evaluation/source/easy/accuracy"] == 0.5
    assert found["evaluation/source/very_hard/reward/mean"] == 0.0
