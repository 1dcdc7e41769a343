import pytest

from flotilla.services.gateway.evaluation.schedule import due_version
from flotilla.services.gateway.evaluation.summary import summarise
from flotilla.shared.schemas.trajectory import GradeStatus, Group
from flotilla.shared.testing.builders import a_group, a_task, a_trajectory


def due(policy: int, evaluated: int | None, every: int | None = 5, *, trained: bool = False) -> int | None:
    return due_version(policy_version=policy, evaluated_version=evaluated, every_versions=every, is_trained=trained)


def test_the_first_version_the_last_and_each_that_is_due_between_them() -> None:
    assert due(0, None) == 0
    assert [version for version in range(12) if due(version, 0) == version] == [5, 6, 7, 8, 9, 10, 11]
    assert [version for version in range(12) if due(version, 5) is not None] == [10, 11]
    assert due(12, 10, trained=True) == 12
    assert due(12, 12, trained=True) is None


def test_one_that_took_long_skips_to_the_newest_version() -> None:
    assert due(17, 5) == 17
    assert due(19, 17) is None
    assert due(20, 17) == 20


def test_without_an_interval_only_the_start_and_the_end() -> None:
    assert due(0, None, None) == 0
    assert due(99, 0, None) is None
    assert due(99, 0, None, trained=True) == 99


def test_an_error_is_no_zero() -> None:
    failed = a_trajectory().graded(GradeStatus.ERROR, None, reason="grader is unavailable")
    abstained = a_trajectory().graded(GradeStatus.ABSTAINED, None)
    groups = [
        a_group(a_task(0), rewards=[1.0, 0.0]),
        Group(a_task(1), (a_trajectory(reward=1.0), failed)),
        Group(a_task(2), (failed, abstained)),
    ]

    metrics = summarise(groups, num_lost=2)

    assert metrics["evaluation/accuracy"] == pytest.approx((0.5 + 1.0) / 2)
    assert metrics["evaluation/reward_mean"] == pytest.approx(2 / 3)
    assert (metrics["evaluation/num_graded_rows"], metrics["evaluation/num_rows"]) == (2, 5)
    assert metrics["evaluation/num_scored"] == 3
    assert metrics["evaluation/num_errors"] == 2 + 2
    assert metrics["evaluation/mean_completion_tokens"] == 5


@pytest.mark.parametrize(("rewards", "is_accuracy"), [([1.0, 0.0], True), ([1.0, 0.5], False), ([2.0, 0.0], False)])
def test_only_right_and_wrong_make_an_accuracy(rewards: list[float], is_accuracy: bool) -> None:
    metrics = summarise([a_group(a_task(0), rewards=rewards)], num_lost=0)

    assert ("evaluation/accuracy" in metrics) is is_accuracy
    assert metrics["evaluation/reward_mean"] == sum(rewards) / 2


def test_when_nothing_was_scored_there_is_no_accuracy() -> None:
    assert summarise([], num_lost=4) == {
        "evaluation/num_rows": 4.0,
        "evaluation/num_graded_rows": 0.0,
        "evaluation/num_scored": 0.0,
        "evaluation/num_errors": 4.0,
    }
