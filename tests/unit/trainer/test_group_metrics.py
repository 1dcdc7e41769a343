"""A fifth of all samples is lost to infrastructure: rewards and advantages are those of the run without, and it counts.

Groups go through the reward service's consumer, with its shaping, to what the trainer measures and computes of a step.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from flotilla.services.reward.grading import with_grades
from flotilla.services.trainer.data.batch import make_batch
from flotilla.services.trainer.data.group_metrics import Totals, describe_groups
from flotilla.services.trainer.learning.advantages import step_advantages
from flotilla.shared.schemas.grading import Grade, GradingSample
from flotilla.shared.schemas.trajectory import GradeStatus, Group, Trajectory
from flotilla.shared.testing.builders import a_task, a_trajectory
from tests.unit.reward.test_consumer import a_world
from tests.unit.trainer.builders import a_spec

NUM_GROUPS, SIZE, NUM_LOST = 25, 8, 2
"""Each group has two members more in the run with failures: 20 % of its ten."""
REWARDS = np.random.default_rng(7).normal(1.0, 0.5, (NUM_GROUPS, SIZE))
LOST = "the grader cannot be reached"
STATISTICS = ("reward/mean", "reward/std", "reward/min", "reward/max", "completion_tokens/mean", "samples/in_step")
SHAPED = {"shaping": {"normalisation": {"mean": "group", "std": "group"}}}


def grade(sample: GradingSample) -> Grade:
    """Grade what an answer says it is worth, but for those whose grader is not there."""
    return Grade.error(LOST) if sample.response == LOST else Grade.scored(float(sample.response))


def answers(group: int) -> list[Trajectory]:
    """Make the answers that nothing befalls, of different lengths."""
    worths = map(repr, REWARDS[group].tolist())
    return [a_trajectory(text=text, seed=n, sampled_tokens=3 + n + group % 5) for n, text in enumerate(worths)]


def groups_with(lost: Sequence[Trajectory]) -> list[Group]:
    """Make the groups of a run, some members of each lost, at any place."""
    chance, made = np.random.default_rng(1), []
    for number in range(NUM_GROUPS):
        members = answers(number)
        for each in lost:
            members.insert(int(chance.integers(len(members) + 1)), each)
        made.append(Group(a_task(number, group_size=len(members)), tuple(members)))
    return made


async def graded(groups: Sequence[Group], **reward: Any) -> tuple[list[Group], int]:
    """Let the reward service grade groups; return them, and how many samples it says have failed."""
    async with a_world(grade, **reward) as world:
        await world.generate(*groups)
        await world.until(lambda ledger: ledger.waiting.scored == len(groups))
        return sorted(await world.scored(), key=lambda group: group.task.group_id), world.worker.failed_samples


def learned(groups: Sequence[Group], kind: str) -> tuple[dict[str, float], np.ndarray]:
    """Return what the trainer measures of a step of groups, and the advantages of the tokens in order."""
    spec = a_spec(rollout={"group_size": SIZE}, algorithm={"advantage": {"kind": kind}})
    batch = make_batch(groups)
    nothing = dict.fromkeys(("ref_log_probs", "sum_pi_squared", "values", "kl_coefficient"))
    found = step_advantages(spec, batch, old_log_probs=batch.rollout_log_probs, **nothing)  # type: ignore[arg-type]
    return describe_groups(groups, 0, Totals(), lambda _, __: 0), found.advantages.double().numpy()


IN_ITS_EPISODE = a_trajectory(text="0").graded(GradeStatus.ERROR, None, reason="the session was lost")
IN_ITS_GRADER = a_trajectory(text=LOST)


@pytest.mark.parametrize("lost", [IN_ITS_EPISODE, IN_ITS_GRADER, None], ids=["episodes", "graders", "both"])
@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "opo"])
@pytest.mark.parametrize("reward", [{}, SHAPED], ids=["as graded", "normalised"])
async def test_with_a_fifth_lost_all_that_is_learned_is_that_of_the_run_without(
    lost: Trajectory | None, kind: str, reward: dict[str, Any]
) -> None:
    failures = [lost] * NUM_LOST if lost is not None else [IN_ITS_EPISODE, IN_ITS_GRADER]
    with_failures, num_failed = await graded(groups_with(failures), **reward)
    without, none_failed = await graded(groups_with([]), **reward)

    told, advantages = learned(with_failures, kind)
    expected, wanted = learned(without, kind)

    assert {name: told[name] for name in STATISTICS} == pytest.approx(
        {name: expected[name] for name in STATISTICS}, abs=1e-9, rel=0
    )
    assert np.abs(advantages - wanted).max() <= 1e-9
    assert (num_failed, none_failed) == (NUM_GROUPS * NUM_LOST, 0)
    assert num_failed / (NUM_GROUPS * (SIZE + NUM_LOST)) == 0.2
    assert (told["samples/without_reward"], expected["samples/without_reward"]) == (num_failed, 0.0)
    assert {t.reward for group in with_failures for t in group.trajectories if t.status is GradeStatus.ERROR} == {None}


async def test_a_zero_in_their_place_would_be_another_mean() -> None:
    groups = groups_with([IN_ITS_GRADER] * NUM_LOST)
    (first, *others), _ = await graded(groups)
    zero = Grade.scored(0.0)
    as_zeros = [
        with_grades(each, [zero if t.reward is None else Grade.scored(t.reward) for t in each.trajectories], 0.0, ())
        for each in (first, *others)
    ]

    told, _ = learned(as_zeros, "grpo")

    assert told["reward/mean"] == pytest.approx(0.8 * REWARDS.mean())
