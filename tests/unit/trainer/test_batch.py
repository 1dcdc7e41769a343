"""Turns with prompts of their own: each is a sequence, by a naive reading of what should be trained."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils import parameters_to_vector

from flotilla.services.rollout.trajectory_builder import TrajectoryBuilder
from flotilla.services.trainer.algorithms.advantages import compute_advantages
from flotilla.services.trainer.data.batch import make_batch, piece_starts, pieces
from flotilla.services.trainer.learning.advantages import advantage_inputs
from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.learning.trace import TracedStep
from flotilla.services.trainer.models.loading import LoadedModel
from flotilla.services.trainer.replay.regraded import NewlyGraded, regraded_advantages
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.schemas.prompt_image import PromptImage
from flotilla.shared.schemas.routing import Ids, RoutedExperts
from flotilla.shared.schemas.sample_kinds import KeptGroup, SampleKind
from flotilla.shared.schemas.trajectory import GradeStatus, Group, Trajectory
from flotilla.shared.schemas.turns import FinishReason, Turn
from flotilla.shared.testing.builders import a_task
from tests.unit.trainer.builders import a_model, a_spec

NOTHING: dict[str, Any] = dict.fromkeys(("values", "old_log_probs", "ref_log_probs", "sum_pi_squared"))
TEMPLATE = "{history}|{observation}"
ROLLOUT = {
    "group_size": 2,
    "episodes": {
        "kind": "environment",
        "environments": [{"environment": "frozen_lake", "memory": {"turns": 2}, "turn_template": TEMPLATE}],
    },
}
EPISODES = (
    ([0.0, -0.5, 1.0], [7, 8, 7]),
    ([0.25], [7]),
    ([0.0, 0.0], [7, 9]),
)
"""Rewards and states of the turns of a group's episodes."""


def an_episode(rewards: list[float], states: list[int], *, total: float | None = None, is_fresh: bool = True) -> Any:
    """Make an episode whose turns see two or three tokens and sample two, with another version from the second on."""
    builder = TrajectoryBuilder()
    for number, (reward, state) in enumerate(zip(rewards, states, strict=True)):
        builder.show([3, 4 + number, *([2] if number % 2 else [])], "seen", state=state, is_fresh=is_fresh)
        ids = np.array([10 + number, 6], np.int32)
        log_probs = np.full(2, -2.0 - number, np.float32)
        builder.sample(ids, log_probs, ((0, min(number, 1)),), FinishReason.STOP, "done")
        builder.reward(reward)
    return builder.build(FinishReason.STOP).graded(GradeStatus.SCORED, sum(rewards) if total is None else total)


def a_group(*members: Trajectory, number: int = 0) -> Group:
    return Group(a_task(number, group_size=len(members)), members)


def spec_of(**advantage: Any) -> ExperimentSpec:
    reward = {"components": [{"kind": "environment"}]}
    return a_spec(algorithm={"advantage": advantage}, reward=reward, rollout=ROLLOUT)


def one_by_one(trajectory: Trajectory) -> list[Trajectory]:
    """Read each turn as an answer to a prompt of its own, token by token."""
    found = []
    versions = trajectory.token_versions().tolist()
    for turn in trajectory.turns:
        span = range(turn.start, turn.end)
        runs = [(at, versions[p]) for at, p in enumerate(span) if not at or versions[p] != versions[p - 1]]
        found.append(
            Trajectory(
                token_ids=np.array([trajectory.token_ids[p] for p in span], np.int32),
                loss_mask=np.array([int(p >= turn.sampled) for p in span], np.uint8),
                log_probs=np.array([trajectory.log_probs[p] if p >= turn.sampled else 0.0 for p in span], np.float32),
                versions=tuple(runs),
                finish_reason=trajectory.finish_reason,
                status=GradeStatus.SCORED,
                reward=trajectory.reward,
            )
        )
    return found


def test_a_trajectory_is_cut_before_each_prompt_that_stands_alone() -> None:
    whole = an_episode(*EPISODES[0])

    parts = pieces(whole)

    assert piece_starts(whole) == [0, 4, 9]
    for part, naive in zip(parts, one_by_one(whole), strict=True):
        assert part.token_ids.tolist() == naive.token_ids.tolist()
        assert part.loss_mask.tolist() == naive.loss_mask.tolist()
        assert part.log_probs.tolist() == naive.log_probs.tolist()
        assert part.token_versions().tolist() == naive.token_versions().tolist()
        assert (part.turns[0].start, part.turns[0].end) == (0, len(part.token_ids))
    appended = an_episode(*EPISODES[0], is_fresh=False)
    assert pieces(appended) == [appended]


def test_the_experts_of_a_trajectory_are_uncompressed_once_for_all_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = an_episode([0.0] * 6, list(range(6)))
    chosen = np.random.default_rng(0).integers(0, 4, (len(whole.token_ids) - 1, 3, 1))
    whole = replace(whole, experts=RoutedExperts.of(chosen, 4))
    read, ids = list[int](), RoutedExperts.ids

    def counted(experts: RoutedExperts) -> Ids:
        read.append(experts.num_tokens)
        return ids(experts)

    monkeypatch.setattr(RoutedExperts, "ids", counted)
    batch = make_batch([a_group(whole)], replays_engine=True)
    starts = piece_starts(whole)

    assert sum(read) < 2 * len(whole.token_ids), "the whole, and then each piece"
    assert batch.experts is not None
    for found, start, end in zip(batch.experts, starts, [*starts[1:], None], strict=True):
        assert np.array_equal(found, chosen[start : len(chosen) if end is None else end - 1])


def test_turns_without_a_prompt_of_their_own_stay_with_the_one_before_them() -> None:
    builder = TrajectoryBuilder()
    for number, is_fresh in enumerate([False, False, True, False]):
        builder.show([3, 4], is_fresh=is_fresh)
        builder.sample(np.array([9], np.int32), np.zeros(1, np.float32), ((0, number),), FinishReason.STOP)
    whole = builder.build(FinishReason.STOP).graded(GradeStatus.SCORED, 1.0)

    first, second = pieces(whole)

    assert [turn.end for turn in first.turns] == [3, 6]
    assert [turn.end for turn in second.turns] == [3, 6]
    assert second.token_versions().tolist() == [1, 1, 2, 2, 2, 3]


def test_what_a_turn_sees_and_is_travels() -> None:
    turn = an_episode(*EPISODES[0]).turns[1]

    assert turn.is_fresh
    assert Turn.from_wire(turn.to_wire()) == turn
    assert "is_fresh" not in replace(turn, is_fresh=False).to_wire()


def naive_gigpo(groups: list[Group], gamma: float, episode_weight: float, step_weight: float) -> list[float]:
    """Compute one advantage per step with loops: episodes in their group, returns among steps of the same state."""
    found = []
    for group in groups:
        totals = [each.reward or 0.0 for each in group.trajectories]
        returns: list[list[float]] = []
        for trajectory in group.trajectories:
            rewards = [turn.reward or 0.0 for turn in trajectory.turns]
            rewards[-1] += (trajectory.reward or 0.0) - sum(rewards)
            returns.append([sum(gamma**k * r for k, r in enumerate(rewards[at:])) for at in range(len(rewards))])
        steps = [
            (member, turn.state, returns[member][at])
            for member, trajectory in enumerate(group.trajectories)
            for at, turn in enumerate(trajectory.turns)
        ]
        mean = sum(totals[member] for member, _, _ in steps) / len(steps)
        for member, state, value in steps:
            alike = [other for _, its_state, other in steps if its_state == state]
            advantage = episode_weight * (totals[member] - mean)
            found.append(advantage + step_weight * (value - sum(alike) / len(alike)))
    return found


def test_gigpo_weighs_each_step_as_a_sequence_of_its_own() -> None:
    groups = [a_group(*(an_episode(*each) for each in EPISODES), number=number) for number in range(2)]
    groups[1] = a_group(*(an_episode([1.0, 2.0], [7, 8], total=4.0), an_episode([0.5], [8])), number=1)
    spec = spec_of(kind="gigpo", gamma=0.5, episode_weight=2.0, step_weight=0.5, divide_by_std=False)

    batch = make_batch(groups)
    found = compute_advantages(spec.algorithm.advantage, advantage_inputs(spec, batch, **NOTHING)).advantages

    expected = naive_gigpo(groups, 0.5, 2.0, 0.5)
    assert batch.num_sequences == len(expected) == 9
    assert batch.sequences.shares is None
    # The spans are the two sampled tokens of each step: what it was shown comes before its first sampled one.
    assert found.tolist() == pytest.approx([value for value in expected for _ in range(2)])


def test_estimators_of_whole_answers_give_each_step_the_advantage_of_its_episode() -> None:
    group = a_group(an_episode([0.0, 1.0], [1, 2]), an_episode([0.0], [1]))
    spec = spec_of(kind="grpo", normalise_by_std=False)

    found = compute_advantages(
        spec.algorithm.advantage, advantage_inputs(spec, make_batch([group]), **NOTHING)
    ).advantages

    # 1 and 0, so +-0.5: by steps it would be 1/3 and -2/3.
    assert found.tolist() == pytest.approx([0.5] * 4 + [-0.5] * 2)


@pytest.mark.parametrize("packing", ["padded", "packed"])
def test_a_step_learns_what_its_turns_as_separate_answers_would_teach(packing: str) -> None:
    episodes = [an_episode([0.0, 1.0], [1, 2]), an_episode([0.5, 0.0], [1, 3])]
    whole = a_group(*episodes)
    apart = a_group(*(part for each in episodes for part in one_by_one(each)))
    weights = []
    # Of two steps each, so that the mean of the group is the same by steps and by episodes.
    for group in (whole, apart):
        spec = a_spec(
            algorithm={"advantage": {"kind": "grpo", "normalise_by_std": False}},
            reward={"components": [{"kind": "environment"}]},
            rollout=ROLLOUT,
            optimisation={"groups_per_mini_batch": 1, "packing": packing, "learning_rate": 1e-2, "epsilon": 1.0},
        )
        learner = Learner(spec, LoadedModel(a_model(), Path()))
        before = parameters_to_vector(learner.loaded.model.parameters()).detach().clone()
        learner.train([group], 1)
        weights.append(parameters_to_vector(learner.loaded.model.parameters()).detach().clone())
        assert not torch.equal(before, weights[-1])

    torch.testing.assert_close(weights[0], weights[1], atol=1e-5, rtol=0)


def test_what_is_found_of_tokens_is_kept_where_they_are_in_the_whole() -> None:
    group = a_group(an_episode([0.0, 1.0], [1, 2]), an_episode([0.5], [1]))
    batch = make_batch([group])
    numbers = np.arange(len(batch.positions), dtype=np.float32)
    named = dict.fromkeys(("advantages", "old_log_probs", "log_probs", "weights", "clipped"), numbers)
    traced = TracedStep(
        span_starts=batch.span_starts,
        span_lengths=tuple(batch.span_lengths),
        mask=batch.sequences.response_mask.numpy(),
        ref_log_probs=None,
        **named,
    )

    ((_, (first, second)),) = traced.of_groups([group], lambda version: version)

    assert first is not None
    assert second is not None
    gap = float("nan")
    np.testing.assert_equal(first.advantages, np.array([gap, gap, 0, 1, gap, gap, gap, 2, 3], np.float32))
    np.testing.assert_equal(second.advantages, np.array([gap, gap, 4, 5], np.float32))


def test_new_rewards_are_compared_by_episode_and_laid_where_tokens_were() -> None:
    group = a_group(an_episode([0.0, 1.0], [1, 2]), an_episode([0.0], [1]))
    spec = spec_of(kind="grpo", normalise_by_std=False)

    ((first, second),) = regraded_advantages(spec, [NewlyGraded(KeptGroup(group, SampleKind.TRAINED), group)])

    assert first is not None
    assert second is not None
    gap = float("nan")
    np.testing.assert_equal(first, np.array([gap, gap, 0.5, 0.5, gap, gap, gap, 0.5, 0.5], np.float32))
    np.testing.assert_equal(second, np.array([gap, gap, -0.5, -0.5], np.float32))


def test_new_rewards_of_what_was_shown_pictures_later_need_nobody_who_can_see_them() -> None:
    plain = a_group(an_episode([0.0, 1.0], [1, 2]), an_episode([0.0], [1]))
    first = replace(plain.trajectories[0], images=(PromptImage(4, 1, b"a picture"),))
    group = replace(plain, trajectories=(first, plain.trajectories[1]))
    spec = spec_of(kind="grpo", normalise_by_std=False)

    found, expected = (
        regraded_advantages(spec, [NewlyGraded(KeptGroup(each, SampleKind.TRAINED), each)]) for each in (group, plain)
    )

    np.testing.assert_equal(found, expected)


def test_step_reinforce_may_compare_all_steps_of_a_training_step() -> None:
    groups = [a_group(an_episode([0.0, 3.0], [1, 2])), a_group(an_episode([1.0], [1]), number=1)]
    spec = spec_of(kind="step_reinforce", gamma=1.0, divide_by_std=False, over="batch")

    found = compute_advantages(
        spec.algorithm.advantage, advantage_inputs(spec, make_batch(groups), **NOTHING)
    ).advantages

    # Returns 3, 3 and 1, whose mean is 7/3.
    assert found.tolist() == pytest.approx([2 / 3] * 4 + [-4 / 3] * 2)
