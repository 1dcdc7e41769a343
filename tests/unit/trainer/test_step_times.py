from operator import sub

import pytest

from flotilla.services.trainer.data.group_metrics import Totals, describe_groups
from flotilla.services.trainer.data.plan import StepGroups
from flotilla.services.trainer.learning.learner import StepResult
from flotilla.services.trainer.models.optimizer import UpdateResult
from flotilla.services.trainer.worker.step_times import MAX_BROKEN_STEPS, GradientWatch, StepTimes, describe_step
from flotilla.shared.errors import ModelError
from flotilla.shared.schemas.trajectory import Group
from flotilla.shared.streams.plans import Plan
from flotilla.shared.testing.builders import a_task
from tests.unit.trainer.builders import a_group, a_trajectory

A_PLAN = Plan(1, 0, (0,), (), 0, 0, 3, (3,))


def a_result(*, is_applied: bool = True) -> StepResult:
    norm = 2.0 if is_applied else float("nan")
    return StepResult((UpdateResult(grad_norm=norm, learning_rate=0.1, is_applied=is_applied),), {"loss/total": 0.5})


def waited(seconds: float) -> StepGroups:
    return StepGroups(A_PLAN, (), False, wait_seconds=seconds, pace_seconds=0.0)


def test_the_idle_ratio_is_that_of_all_steps_of_a_version() -> None:
    times = StepTimes()

    times.add(waited(3.0), compute=1.0, publish=0.0, checkpoint=0.0)
    between = describe_step(a_result(), times, 0.0, ends_version=False)
    times.add(waited(1.0), compute=2.0, publish=0.5, checkpoint=0.5)
    at_the_end = describe_step(a_result(), times, 0.0, ends_version=True)

    assert "trainer/idle_ratio" not in between
    assert at_the_end["trainer/idle_ratio"] == pytest.approx(4 / 8)


def test_a_gradient_that_is_not_finite_is_counted_and_not_reported() -> None:
    times = StepTimes()
    times.add(waited(0.0), compute=1.0, publish=0.0, checkpoint=0.0)

    values = describe_step(a_result(is_applied=False), times, 0.0, ends_version=True)

    assert "grad_norm" not in values
    assert values["updates/skipped"] == 1


def test_training_ends_when_no_gradient_is_finite_any_more() -> None:
    watch = GradientWatch()
    for step in range(1, MAX_BROKEN_STEPS):
        watch.check(a_result(is_applied=False), step)
    watch.check(a_result(), MAX_BROKEN_STEPS)

    with pytest.raises(ModelError, match="not finite in 3 steps, the last one being step 7"):
        for step in range(5, 9):
            watch.check(a_result(is_applied=False), step)


def test_lags_and_partial_trajectories_are_counted_token_by_token() -> None:
    partial = a_trajectory(2, [4], 1.0, versions=((0, 1), (3, 3)))
    fresh = a_trajectory(2, [2], 0.0, version=3)
    stale = Group(a_task(0, group_size=2), (partial, fresh))
    totals = Totals()

    values = describe_groups([stale, a_group([1.0, 0.0, None], 1, version=3)], 3, totals, sub)

    assert values["lag/max"] == 2
    assert (values["lag/tokens/0"], values["lag/tokens/2"]) == (13, 1)
    assert "lag/tokens/1" not in values
    assert values["lag/mean"] == pytest.approx(2 / 14)
    assert values["fully_async/partial/total_partial_num"] == 1
    assert values["fully_async/partial/partial_ratio"] == pytest.approx(1 / 4)
    assert values["fully_async/partial/max_partial_span"] == 2
    assert values["fully_async/count/stale_samples_processed"] == 1
    assert values["fully_async/count/stale_trajectory_processed"] == 1
    assert values["reward/mean"] == 0.5
    assert values["samples/without_reward"] == 1
    assert totals.trained_tokens == 14
