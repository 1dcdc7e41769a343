"""What the trainer makes of turns: rewards where they were earned, steps that are compared, baselines."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils import parameters_to_vector

from flotilla.services.rollout.trajectory_builder import TrajectoryBuilder
from flotilla.services.trainer.algorithms.advantages import Advantages, compute_advantages
from flotilla.services.trainer.data.batch import make_batch
from flotilla.services.trainer.learning.advantages import advantage_inputs
from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.models.loading import LoadedModel
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.schemas.trajectory import GradeStatus, Group, Trajectory
from flotilla.shared.schemas.turns import FinishReason, Turn
from flotilla.shared.testing.builders import a_task
from tests.unit.trainer.builders import a_model, a_spec

ENVIRONMENT = {"components": [{"kind": "environment"}]}
EPISODES = {
    "group_size": 4,
    "episodes": {"kind": "environment", "environments": [{"environment": "frozen_lake"}]},
}
NOTHING: dict[str, Any] = dict.fromkeys(("values", "old_log_probs", "ref_log_probs", "sum_pi_squared"))


def an_episode(
    rewards: list[float], states: list[int | None], *, total: float | None = None, is_baseline: bool = False
) -> Trajectory:
    """Make an episode whose turns have two tokens of context and two sampled ones."""
    builder = TrajectoryBuilder()
    for number, (reward, state) in enumerate(zip(rewards, states, strict=True)):
        builder.show([3, 4], "seen", state=state)
        ids = np.array([5 + number, 6], np.int32)
        builder.sample(ids, np.full(2, -3.0, np.float32), ((0, 0),), FinishReason.STOP, "done")
        builder.reward(reward)
    made = builder.build(FinishReason.STOP, is_baseline=is_baseline)
    return made.graded(GradeStatus.SCORED, sum(rewards) if total is None else total)


def a_group(*members: Trajectory, number: int = 0) -> Group:
    return Group(a_task(number, group_size=len(members)), members)


def spec_of(**advantage: Any) -> ExperimentSpec:
    return a_spec(algorithm={"advantage": advantage}, reward=ENVIRONMENT, rollout=EPISODES)


def advantages_of(spec: ExperimentSpec, *groups: Group) -> Advantages:
    return compute_advantages(spec.algorithm.advantage, advantage_inputs(spec, make_batch(groups), **NOTHING))


def test_a_reward_counts_from_the_turn_that_earned_it_and_the_rest_at_the_end() -> None:
    # The reward that is trained has 0.5 more than the environment gave: that belongs to the end.
    group = a_group(an_episode([1.0, -2.0], [None, None], total=-0.5))

    found = advantages_of(spec_of(kind="turn_reinforce", gamma=0.5), group).advantages

    # The first context is before the span: sampled, sampled, shown, shown, sampled, sampled.
    assert found.tolist() == pytest.approx([0.25, 0.25, 0, 0, -1.5, -1.5])


def test_rewards_of_turns_that_are_not_part_of_the_reward_move_nothing() -> None:
    spec = a_spec(algorithm={"advantage": {"kind": "turn_reinforce"}}, reward={"components": [{"kind": "numeric"}]})

    found = advantages_of(spec, a_group(an_episode([1.0, -2.0], [None, None], total=3.0))).advantages

    assert found.tolist() == [3, 3, 0, 0, 3, 3]


def test_gigpo_compares_episodes_in_their_group_and_steps_from_the_same_state() -> None:
    good, bad = an_episode([0.0, 1.0], [8, 9]), an_episode([0.0, 0.0], [8, 7])
    spec = spec_of(kind="gigpo", gamma=0.5, divide_by_std=False)

    found = advantages_of(spec, a_group(good, bad)).advantages

    # Episodes: 1 and 0, so +-0.5. Steps from state 8: returns 0.5 and 0, so +-0.25; states 9 and 7 have one step each.
    assert found.tolist() == pytest.approx([0.75, 0.75, 0, 0, 0.5, 0.5, -0.75, -0.75, 0, 0, -0.5, -0.5])


def test_step_reinforce_compares_the_returns_of_all_steps_of_a_group() -> None:
    spec = spec_of(kind="step_reinforce", gamma=1.0, divide_by_std=False)

    found = advantages_of(spec, a_group(an_episode([0.0, 1.0], [None] * 2), an_episode([0.0], [None]))).advantages

    third = 1 / 3
    assert found.tolist() == pytest.approx([third, third, 0, 0, third, third, -2 * third, -2 * third])


def test_a_greedy_answer_is_the_baseline_and_is_not_trained() -> None:
    group = a_group(an_episode([1.0], [None]), an_episode([0.25], [None], is_baseline=True))

    found = advantages_of(spec_of(kind="remax"), group).advantages

    assert found.tolist() == pytest.approx([0.75, 0.75])
    assert group.rewards() == [1.0]


@pytest.mark.parametrize("kind", ["gigpo", "step_reinforce", "turn_reinforce", "grpo", "remax"])
def test_an_estimator_trains_whole_and_cut_steps_alike(kind: str) -> None:
    groups = [
        a_group(
            an_episode([0.1 * number, 1.0, -0.5], [1, 2, 3]),
            an_episode([0.3], [1]),
            an_episode([0.0, 0.2], [1, 3]),
            *([an_episode([0.4], [1], is_baseline=True)] if kind == "remax" else []),
            number=number,
        )
        for number in range(2)
    ]
    weights = []
    for layout in ({"packing": "padded"}, {"packing": "packed", "micro_batch_tokens": 20}):
        spec = a_spec(
            algorithm={"advantage": {"kind": kind}},
            reward=ENVIRONMENT,
            rollout=EPISODES,
            optimisation={"steps": 5, "groups_per_mini_batch": 2, "learning_rate": 1e-2, "epsilon": 1.0, **layout},
        )
        learner = Learner(spec, LoadedModel(a_model(), Path()))
        before = parameters_to_vector(learner.loaded.model.parameters()).detach().clone()
        learner.train(groups, 1)
        weights.append(parameters_to_vector(learner.loaded.model.parameters()).detach())
        assert not torch.equal(before, weights[-1])

    torch.testing.assert_close(weights[0], weights[1], atol=1e-5, rtol=0)


def test_masked_turns_do_not_disturb_the_others() -> None:
    masked = an_episode([1.0, 1.0], [1, 2])
    empty = replace(masked, loss_mask=np.zeros_like(masked.loss_mask), log_probs=np.zeros_like(masked.log_probs))

    found = advantages_of(spec_of(kind="gigpo"), a_group(empty, an_episode([0.0, 0.0], [1, 2]))).advantages

    assert len(found) == 6
    assert found[0] < 0


def test_turns_know_their_place() -> None:
    assert an_episode([0.0, 0.5], [1, None]).turns == (
        Turn(0, 2, 4, FinishReason.STOP, "done", "", 0.0, 1),
        Turn(4, 6, 8, FinishReason.STOP, "done", "seen", 0.5),
    )


AGENTS = {"group_size": 4, "agents": {}}


def a_branch(episode: str | None, reward: float, *, num_turns: int = 1) -> Trajectory:
    return replace(an_episode([0.0] * num_turns, [None] * num_turns, total=reward), episode=episode)


@pytest.mark.parametrize(
    "kind", ["grpo", "rloo", "dr_grpo", "opo", "gpg", "grpo_passk", "reinforce_plus_plus_baseline"]
)
def test_an_episode_of_several_branches_is_compared_once(kind: str) -> None:
    spec = a_spec(algorithm={"advantage": {"kind": kind}}, rollout=AGENTS)
    members = [a_branch("b", 0.0), a_branch("c", 0.25), a_branch("d", 0.0)]
    single = [a_branch("a", 1.0, num_turns=3), *members]
    branched = [a_branch("a", 1.0), *members, *[a_branch("a", 1.0)] * 2]

    def found(group: Group, *, joins: bool) -> list[float]:
        batch = make_batch([group], joins_branches=joins)
        inputs = advantage_inputs(spec, batch, **NOTHING)
        made = compute_advantages(spec.algorithm.advantage, inputs).advantages
        return [
            float(made[batch.sequences.index == number].amax()) or float(made[batch.sequences.index == number].amin())
            for number in range(batch.num_sequences)
        ]

    expected = found(a_group(*single), joins=True)
    joined = found(a_group(*branched), joins=True)
    assert joined == pytest.approx([*expected, expected[0], expected[0]])
    if kind not in {"opo", "reinforce_plus_plus_baseline"}:  # by tokens, and whitened
        assert found(a_group(*branched), joins=False) != pytest.approx(joined), "each branch counts"


def test_branches_share_the_weight_of_one_and_their_mean_reward() -> None:
    spec = a_spec(algorithm={"advantage": {"kind": "dr_grpo"}}, rollout=AGENTS)
    group = a_group(a_branch("a", 1.0), a_branch(None, 0.0), a_branch("a", 0.0), a_branch(None, 0.0))

    batch = make_batch([group, a_group(a_branch("a", 1.0), number=1)], joins_branches=True)
    advantages = compute_advantages(spec.algorithm.advantage, advantage_inputs(spec, batch, **NOTHING)).advantages

    assert batch.sequences.shares is not None and batch.episode_index is not None
    assert batch.sequences.shares.tolist() == [0.5, 1.0, 0.5, 1.0, 1.0]
    assert batch.episode_index.tolist() == [0, 1, 0, 2, 3], "the same name in another group is another episode"
    first = [float(advantages[batch.sequences.index == number][0]) for number in range(5)]
    assert first == pytest.approx([1 / 3, -1 / 6, 1 / 3, -1 / 6, 0.0])
    taken, _ = batch.take(torch.tensor([2, 1]))
    assert taken.sequences.shares is not None and taken.sequences.shares.tolist() == [0.5, 1.0]
    assert make_batch([group]).sequences.shares is None


def test_rejected_tokens_add_nothing_to_the_energy_of_the_token_baseline() -> None:
    rejection = {"scope": "token", "statistic": "ratio", "lower": 0.5, "upper": 2.0}
    advantage = {"kind": "optimal_token_baseline"}
    correction = {"rejections": [rejection]}
    algorithm = {"advantage": advantage, "old_log_probs": "recompute", "correction": correction}
    spec = a_spec(algorithm=algorithm, reward={"components": [{"kind": "numeric"}]}, rollout={"group_size": 2})
    batch = make_batch([a_group(an_episode([1.0], [None]), an_episode([0.0], [None]))])
    # The first sampled token of the first member is ten times as likely under the trainer.
    old = batch.rollout_log_probs.clone()
    old[int(batch.sequences.response_mask.nonzero()[0])] += 2.3

    inputs = advantage_inputs(spec, batch, **NOTHING | {"old_log_probs": old, "sum_pi_squared": torch.zeros_like(old)})

    assert inputs.importance_weights is not None
    assert inputs.importance_weights[batch.sequences.response_mask].tolist()[0] == 0
    assert (inputs.importance_weights > 0).sum() == batch.sequences.response_mask.sum() - 1
