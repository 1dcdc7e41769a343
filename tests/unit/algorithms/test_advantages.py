"""Advantage estimators against naive loops, published figures and their own definitions."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flotilla.services.trainer.algorithms.advantages import AdvantageInputs, compute_advantages
from flotilla.services.trainer.algorithms.advantages.agentic import EnvironmentSteps, gigpo, same_state, step_returns
from flotilla.services.trainer.algorithms.advantages.compute import whiten
from flotilla.services.trainer.algorithms.advantages.groups import Groups, gpg, grpo, grpo_passk, opo, rloo
from flotilla.services.trainer.algorithms.advantages.returns import (
    discounted_returns,
    gae,
    rewards_at_last_token,
    turn_returns,
)
from flotilla.services.trainer.algorithms.metrics import summarise
from flotilla.services.trainer.algorithms.sequences import PackedSequences, suffix_recurrence
from flotilla.shared.config.sections.advantage import (
    AdvantageConfig,
    DrGrpoConfig,
    GdpoConfig,
    GigpoConfig,
    GpgConfig,
    GrpoConfig,
    MaskedTokens,
    OpoConfig,
    PassAtKConfig,
    ReinforceBaselineConfig,
    ReinforceConfig,
    ReinforcePlusPlusConfig,
    RlooConfig,
    StepReinforceConfig,
    TokenBaselineConfig,
    TurnReinforceConfig,
    WhitenConfig,
)
from flotilla.shared.config.sections.algorithm import KlRewardConfig
from tests.unit.algorithms.building import a_batch


def one_sequence(mask: list[int]) -> PackedSequences:
    return PackedSequences.of(torch.zeros(len(mask), dtype=torch.long), torch.tensor(mask))


def close(actual: Tensor, expected: list[float], tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(
        actual.float(), torch.tensor(expected, dtype=torch.float32), rtol=tolerance, atol=tolerance
    )


ONE_GROUP = Groups.of(torch.zeros(3, dtype=torch.long))
SCORES = torch.tensor([1.0, 0.5, 0.0])


def test_a_suffix_recurrence_is_the_backward_loop() -> None:
    random = torch.Generator().manual_seed(0)
    decay, increment = torch.rand(37, generator=random), torch.randn(37, generator=random)

    expected, following = torch.zeros(37), torch.zeros(())
    for position in reversed(range(37)):
        following = increment[position] + decay[position] * following
        expected[position] = following

    torch.testing.assert_close(suffix_recurrence(decay, increment), expected)


def test_grpo_of_four_scores() -> None:
    close(
        grpo(torch.tensor([1.0, 0, 0, 1]), Groups.of(torch.zeros(4)), epsilon=1e-6),
        [0.866024, -0.866024, -0.866024, 0.866024],
    )


def test_published_figures_of_group_estimators() -> None:
    close(grpo(SCORES, ONE_GROUP, epsilon=1e-6), [0.999998, 0, -0.999998])
    close(rloo(SCORES, ONE_GROUP), [0.75, 0, -0.75])
    close(opo(SCORES, torch.tensor([10.0, 20, 70]), ONE_GROUP), [0.8, 0.3, -0.2])
    close(gpg(SCORES, ONE_GROUP, scale_over="nonzero_rewards"), [0.75, 0, -0.75])
    close(grpo_passk(SCORES, ONE_GROUP, normalise_by_std=True, epsilon=1e-6), [0.999998, 0, 0])


def test_gpg_scales_by_the_sequences_whose_groups_have_a_gradient() -> None:
    """Of 6 sequences the 2 of the group that is all right teach nothing: B / (B - M) is 6 / 4."""
    scores, groups = torch.tensor([1.0, 1, 1, 0, 0, 0.5]), Groups.of(torch.tensor([0, 0, 1, 1, 2, 2]))

    close(gpg(scores, groups), [0, 0, 0.75, -0.75, -0.375, 0.375])
    close(gpg(scores, groups, scale_over="nonzero_rewards"), [0, 0, 0.75, -0.75, -0.375, 0.375])
    close(gpg(scores[[0, 1, 2, 3]], Groups.of(torch.tensor([0, 0, 1, 1]))), [0, 0, 1, -1])
    close(gpg(torch.tensor([1.0, -1, 0, 0]), Groups.of(torch.tensor([0, 0, 1, 1]))), [2, -2, 0, 0])


@pytest.mark.parametrize(("rule", "expected"), [("zero", 0.0), ("raw", 2.0)])
def test_a_group_of_one(rule: str, expected: float) -> None:
    alone, score = Groups.of(torch.zeros(1)), torch.tensor([2.0])

    for estimate in (rloo(score, alone, group_of_one=rule), opo(score, torch.ones(1), alone, group_of_one=rule)):  # type: ignore[arg-type]
        close(estimate, [expected])
    close(grpo(score, alone, epsilon=1.0, group_of_one=rule), [expected / 2])  # type: ignore[arg-type]


EQUAL = [(8, 0.7), (3, 0.1), (7, 0.3), (5, -0.9), (11, 1 / 3), (64, 0.2)]
"""Sizes of groups, and the score of all their members; float32 carries most of these means off the score."""
TINY = 1e-12
COMPARING: dict[str, AdvantageConfig] = {
    "grpo": GrpoConfig(epsilon=TINY),
    "grpo without a deviation": GrpoConfig(normalise_by_std=False),
    "dr_grpo": DrGrpoConfig(),
    "grpo_passk": PassAtKConfig(epsilon=TINY),
    "gdpo": GdpoConfig(components=("first", "second"), epsilon=TINY),
    "rloo": RlooConfig(),
    "reinforce_plus_plus_baseline": ReinforceBaselineConfig(whiten=WhitenConfig(epsilon=TINY)),
    "opo": OpoConfig(),
    "gpg": GpgConfig(),
    "optimal_token_baseline": TokenBaselineConfig(epsilon=1e-3, drop_tail=False),
    "gigpo": GigpoConfig(gamma=0.9, epsilon=TINY),
    "step_reinforce": StepReinforceConfig(gamma=1.0, epsilon=TINY),
}


def equal_groups(sizes_and_scores: list[tuple[int, float]]) -> AdvantageInputs:
    """Make groups of equal scores; the sequences have 1 to 3 tokens, and each is its environment's only step."""
    sizes = torch.tensor([size for size, _ in sizes_and_scores])
    scores = torch.tensor([score for _, score in sizes_and_scores]).repeat_interleave(sizes)
    groups = torch.arange(len(sizes)).repeat_interleave(sizes)
    numbers = torch.arange(len(scores))
    index = numbers.repeat_interleave(1 + numbers % 3)
    random = torch.Generator().manual_seed(0)
    return AdvantageInputs(
        PackedSequences.of(index, torch.ones_like(index)),
        scores,
        groups,
        old_log_probs=-torch.rand(len(index), generator=random),
        sum_pi_squared=torch.rand(len(index), generator=random),
        component_scores=torch.stack([scores, scores / 3], 1),
        steps=EnvironmentSteps(scores, numbers, torch.zeros_like(numbers), groups, scores),
    )


@pytest.mark.parametrize("config", COMPARING.values(), ids=COMPARING)
def test_equal_scores_teach_exactly_nothing(config: AdvantageConfig) -> None:
    found = compute_advantages(config, equal_groups(EQUAL))

    assert not found.advantages.any()
    assert summarise(found.metrics)["flat_group_fraction"] == 1
    assert summarise(found.metrics)["group_std"] == 0


@pytest.mark.parametrize("kind", [GrpoConfig, DrGrpoConfig, RlooConfig, OpoConfig, GpgConfig])
def test_episodes_of_equal_scores_are_flat_whatever_branches_they_have(kind: type[AdvantageConfig]) -> None:
    inputs = equal_groups([(12, 0.7), (12, 0.1)])
    branches = torch.tensor([1, 2, 3, 6] * 2)
    episodes = torch.arange(len(branches)).repeat_interleave(branches)

    found = compute_advantages(kind(), replace(inputs, episode_index=episodes))

    assert not found.advantages.any()
    assert summarise(found.metrics)["flat_group_fraction"] == 1


@pytest.mark.parametrize(("count", "score"), EQUAL)
@pytest.mark.parametrize("kind", [ReinforceConfig, ReinforcePlusPlusConfig])
@pytest.mark.parametrize("baseline", ["none", "batch_mean"])
def test_a_batch_of_equal_scores_less_their_mean_is_nothing(
    kind: type[ReinforceConfig], baseline: Any, count: int, score: float
) -> None:
    whiten = WhitenConfig(epsilon=TINY) if baseline == "none" else None

    found = compute_advantages(kind(baseline=baseline, whiten=whiten), equal_groups([(count, score)]))

    assert not found.advantages.any()


def test_tied_best_scores_have_no_lead() -> None:
    close(grpo_passk(torch.tensor([1.0, 1.0, 0.0]), ONE_GROUP, normalise_by_std=False, epsilon=1e-6), [0, 0, 0])


def test_groups_need_not_be_neighbours() -> None:
    groups = Groups.of(torch.tensor([7, 3, 7, 3]))

    close(groups.mean(torch.tensor([1.0, 10, 3, 20])), [2, 15, 2, 15])


@pytest.mark.parametrize("positions", ["all", "sampled"])
def test_where_no_token_has_weight_yet_the_token_baseline_is_0(positions: Any) -> None:
    # Two members of three sampled tokens; a correction keeps the last of one and the last two of the other.
    sequences = PackedSequences.of(torch.tensor([0, 0, 0, 1, 1, 1]), torch.ones(6, dtype=torch.long))
    inputs = AdvantageInputs(
        sequences=sequences,
        scores=torch.tensor([1.0, 0.0]),
        group_index=torch.tensor([0, 0]),
        old_log_probs=torch.full((6,), 0.5).log(),
        sum_pi_squared=torch.full((6,), 0.5),
        importance_weights=torch.tensor([0.0, 0.0, 1.0, 0.0, 1.0, 1.0]),
    )

    found = compute_advantages(TokenBaselineConfig(positions=positions, whiten=None), inputs).advantages

    # Last position: energies 1 and 1 + 1 make a baseline of 1/3. The second has that of the one member with weight.
    close(found, [1.0, 1.0, 2 / 3, 0.0, 0.0, -1 / 3])


def test_gae_skips_masked_tokens_as_published() -> None:
    rewards, values = torch.tensor([0, 0, 0, 0, 1.0]), torch.tensor([0.5, 0.4, 0.9, 0.3, 0.6])
    sequences = one_sequence([1, 1, 0, 1, 1])

    advantages, returns = gae(rewards, values, sequences, gamma=1, lam=0.95)

    close(advantages, [0.4187, 0.5460, 0, 0.68, 0.4], 1e-4)
    close(returns, [0.9187, 0.9460, 0, 0.98, 1.0], 1e-4)
    whitened = whiten(advantages, sequences.response_mask, WhitenConfig())
    close(whitened[sequences.response_mask], [-0.711864, 0.268080, 1.299600, -0.855815], 1e-4)


def test_gae_with_masked_steps_bootstraps_from_zero() -> None:
    rewards, values = torch.tensor([0.0, 0, 1]), torch.tensor([0.5, 9.0, 0.2])

    advantages, _ = gae(rewards, values, one_sequence([1, 0, 1]), gamma=0.5, lam=1.0, masked_tokens="step")

    close(advantages, [0.5**2 * 1.0 - 0.5, 0, 0.8])


def test_a_reward_never_reaches_another_sequence() -> None:
    batch = a_batch([4, 5, 3])
    rewards = torch.where(batch.sequences.index == 1, 1.0, 0.0)

    returns = discounted_returns(rewards, batch.sequences, gamma=1.0)

    assert not returns[batch.sequences.index != 1].any()


def test_discounted_returns_as_published() -> None:
    sequences = one_sequence([1, 1, 0, 1, 1])
    rewards = torch.tensor([0, 0, 0, 0, 1.0])

    close(discounted_returns(rewards, sequences, gamma=0.9), [0.729, 0.81, 0, 0.9, 1.0])
    close(discounted_returns(rewards, sequences, gamma=0.9, masked_tokens="step"), [0.6561, 0.729, 0, 0.9, 1.0])


def test_turns_are_discounted_once_each() -> None:
    rewards = torch.tensor([0.3, 1.0, 9.0, 0.0, 2.0])

    close(turn_returns(rewards, one_sequence([1, 1, 0, 1, 1]), gamma=0.5), [2.0, 2.0, 0, 2.0, 2.0])


def test_a_score_sits_on_the_last_sampled_token() -> None:
    sequences = PackedSequences.of(torch.tensor([0, 0, 0, 1, 1, 2]), torch.tensor([1, 1, 0, 1, 1, 0]))

    close(rewards_at_last_token(torch.tensor([5.0, 7.0, 9.0]), sequences), [0, 5, 0, 0, 7, 0])
    close(rewards_at_last_token(torch.tensor([5.0, 7.0, 9.0]), sequences, clip=(-1, 6)), [0, 5, 0, 0, 6, 0])


def test_kl_before_the_baseline_is_compared_within_the_group() -> None:
    """Equal KL for every member cancels before the baseline, and stays after it."""
    sequences = PackedSequences.of(torch.tensor([0, 0, 1, 1]), torch.ones(4))
    inputs = AdvantageInputs(
        sequences,
        torch.tensor([1.0, 0.0]),
        torch.zeros(2, dtype=torch.long),
        old_log_probs=torch.full((4,), -1.0),
        ref_log_probs=torch.full((4,), -1.5),
    )

    before = compute_advantages(DrGrpoConfig(), inputs, kl=KlRewardConfig(coefficient=1.0))
    after = compute_advantages(DrGrpoConfig(), inputs, kl=KlRewardConfig(coefficient=1.0, order="after_baseline"))

    close(before.advantages, [0.5, 0.5, -0.5, -0.5])
    close(after.advantages, [-0.5, 0.0, -1.5, -1.0])
    assert before.observed_kl is not None
    assert float(before.observed_kl) == pytest.approx(0.5)


def test_a_turn_is_charged_for_the_kl_of_all_its_tokens() -> None:
    sequences = one_sequence([1, 1, 1])
    inputs = AdvantageInputs(
        sequences, torch.tensor([1.0]), old_log_probs=torch.full((3,), -1.0), ref_log_probs=torch.full((3,), -1.1)
    )

    found = compute_advantages(TurnReinforceConfig(), inputs, kl=KlRewardConfig(coefficient=1.0))

    close(found.advantages, [0.7, 0.7, 0.7])


def test_the_batch_mean_is_a_baseline() -> None:
    sequences = PackedSequences.of(torch.tensor([0, 1, 1]), torch.ones(3))

    found = compute_advantages(
        ReinforceConfig(baseline="batch_mean"), AdvantageInputs(sequences, torch.tensor([1.0, 0.0]))
    )

    close(found.advantages, [0.5, -0.5, -0.5])


@pytest.mark.parametrize(("baseline", "shift"), [("batch_mean", 1.5), ("none", 0.0)])
def test_rewards_are_divided_by_the_batchs_deviation_and_then_bounded(baseline: Any, shift: float) -> None:
    sequences = PackedSequences.of(torch.tensor([0, 1, 1, 2, 3]), torch.ones(5))
    scores = torch.tensor([0.0, 1.0, 1.0, 4.0])
    config = ReinforceConfig(baseline=baseline, divide_by_std=True, score_clip=(-0.5, 1.0))

    found = compute_advantages(config, AdvantageInputs(sequences, scores))

    expected = ((scores - shift) / (scores.std() + 1e-6)).clamp(-0.5, 1.0)
    close(found.advantages, expected[torch.tensor([0, 1, 1, 2, 3])].tolist())


def test_equal_rewards_of_one_sequence_or_more_have_no_deviation_and_stay_finite() -> None:
    for count in (1, 3):
        sequences = PackedSequences.of(torch.arange(count), torch.ones(count))
        config = ReinforceConfig(baseline="batch_mean", divide_by_std=True)

        close(compute_advantages(config, AdvantageInputs(sequences, torch.ones(count))).advantages, [0.0] * count)


def test_clipping_comes_last_and_is_reported() -> None:
    sequences = PackedSequences.of(torch.tensor([0, 1, 2, 3]), torch.ones(4))
    inputs = AdvantageInputs(sequences, torch.tensor([4.0, 0.0, 0.0, 0.0]), torch.zeros(4))

    found = compute_advantages(DrGrpoConfig(clip=1.5), inputs)

    close(found.advantages, [1.5, -1, -1, -1])
    assert summarise(found.metrics)["advantage_clip_fraction"] == 0.25


def test_flat_groups_are_counted_by_group() -> None:
    sequences = PackedSequences.of(torch.tensor([0, 1, 2, 3, 4]), torch.ones(5))
    inputs = AdvantageInputs(sequences, torch.tensor([1.0, 1, 1, 0, 1]), torch.tensor([0, 0, 0, 1, 1]))

    assert summarise(compute_advantages(GrpoConfig(), inputs).metrics)["flat_group_fraction"] == pytest.approx(0.5)


def test_a_missing_input_is_named() -> None:
    sequences = one_sequence([1])

    with pytest.raises(ValueError, match="group_index"):
        compute_advantages(GrpoConfig(), AdvantageInputs(sequences, torch.zeros(1)))


def test_whitening_sums_across_ranks() -> None:
    values = torch.randn(12, generator=torch.Generator().manual_seed(5))
    mask = torch.ones(12, dtype=torch.bool)
    whole = whiten(values, mask, WhitenConfig())

    # Two ranks hold six values each; a rank's sums are completed by what the other one would add.
    other = values[6:]
    count, total = torch.tensor(6.0), other.sum()
    mean = values.mean()

    def all_sum(own: Tensor) -> Tensor:
        return own + (torch.stack([count, total]) if own.dim() else (other - mean).square().sum())

    torch.testing.assert_close(whiten(values[:6], mask[:6], WhitenConfig(), all_sum), whole[:6], rtol=1e-4, atol=1e-5)


def test_equal_states_of_different_groups_are_not_compared() -> None:
    """Upstream merges them by the state's hash alone."""
    groups = same_state(torch.tensor([0, 0, 1, 1]), torch.tensor([5, 5, 5, 6]))

    close(groups.sizes, [2, 2, 1, 1])


def test_step_returns_do_not_depend_on_the_order_of_steps() -> None:
    scores, trajectory, place = torch.tensor([1.0, 2, 4, 8]), torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])
    order = torch.tensor([3, 0, 2, 1])
    state = torch.zeros(4, dtype=torch.long)

    straight = step_returns(EnvironmentSteps(scores, trajectory, place, state), gamma=0.5)
    shuffled = step_returns(EnvironmentSteps(scores[order], trajectory[order], place[order], state), gamma=0.5)

    close(straight, [2, 2, 8, 8])
    torch.testing.assert_close(shuffled, straight[order])


def test_gigpo_without_episode_scores_is_refused() -> None:
    zeros = torch.zeros(1, dtype=torch.long)

    with pytest.raises(ValueError, match="episode"):
        gigpo(EnvironmentSteps(torch.zeros(1), zeros, zeros, zeros), zeros, gamma=1.0)


def test_scores_are_bounded_between_baseline_and_kl() -> None:
    sequences = PackedSequences.of(torch.tensor([0, 1]), torch.ones(2))
    inputs = AdvantageInputs(
        sequences,
        torch.tensor([9.0, -9.0]),
        torch.zeros(2),
        old_log_probs=torch.tensor([-1.0, -1.0]),
        ref_log_probs=torch.tensor([-1.5, -1.0]),
    )
    kl = KlRewardConfig(coefficient=1.0, order="after_baseline")

    found = compute_advantages(DrGrpoConfig(score_clip=(-1.0, 2.0)), inputs, kl=kl)

    close(found.advantages, [1.5, -1.0])


@pytest.mark.parametrize("masked_tokens", ["skip", "step"])
def test_without_a_future_a_token_returns_its_own_reward_and_gae_its_td_error(masked_tokens: MaskedTokens) -> None:
    sequences = one_sequence([1, 0, 1, 1])
    rewards, values = torch.tensor([0.5, 0.0, -1.0, 2.0]), torch.tensor([0.25, 0.0, 0.5, 1.0])
    config = ReinforceConfig(gamma=0.0, masked_tokens=masked_tokens)

    advantages, to_go = gae(rewards, values, sequences, gamma=config.gamma, lam=0.95, masked_tokens=masked_tokens)

    close(discounted_returns(rewards, sequences, gamma=0.0, masked_tokens=masked_tokens), [0.5, 0, -1.0, 2.0])
    close(advantages, [0.25, 0, -1.5, 1.0])
    close(to_go, [0.5, 0, -1.0, 2.0])


def test_without_a_future_a_turn_returns_its_own_reward() -> None:
    rewards = torch.tensor([0.0, 1.0, 0.0, 0.0, 2.0])

    close(turn_returns(rewards, one_sequence([1, 1, 0, 1, 1]), gamma=0.0), [1.0, 1.0, 0.0, 2.0, 2.0])


@pytest.mark.parametrize(
    ("positions", "drop_tail", "expected"),
    [
        # Position 1: weights 0.5 and 1, returns 1 and 0; position 2: 1 and 1.5. Position 0 has the second member alone.
        ("all", False, [0.0, 2 / 3, 3 / 5, 0.0, -1 / 3, -2 / 5]),
        # The second member, of three tokens, is alone from the third position on.
        ("all", True, [0.0, 2 / 3, 3 / 5, 0.0, -1 / 3, 0.0]),
        # First sampled tokens: weights 0.5 and 0.5; second ones: 1 and 1; the third is the second member's alone.
        ("sampled", True, [0.0, 1 / 2, 1 / 2, -1 / 2, -1 / 2, 0.0]),
    ],
)
def test_a_member_that_begins_masked_is_compared_at_its_positions(
    positions: Any, expected: list[float], *, drop_tail: bool
) -> None:
    sequences = PackedSequences.of(torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([0, 1, 1, 1, 1, 1]))
    inputs = AdvantageInputs(
        sequences=sequences,
        scores=torch.tensor([1.0, 0.0]),
        group_index=torch.tensor([0, 0]),
        old_log_probs=torch.full((6,), 0.5).log(),  # energy 1 - 2 * 0.5 + 0.5 of each sampled token
        sum_pi_squared=torch.full((6,), 0.5),
    )
    config = TokenBaselineConfig(positions=positions, drop_tail=drop_tail, whiten=None)

    close(compute_advantages(config, inputs).advantages, expected)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (WhitenConfig(), [0.0, 0.0, 0.0]),
        (WhitenConfig(of_one="raw"), [0.0, 3.0, 0.0]),
        (WhitenConfig(of_one="raw", centre_only=True), [0.0, 3.0, 0.0]),
    ],
)
def test_one_sampled_token_becomes_0_or_keeps_its_advantage(config: WhitenConfig, expected: list[float]) -> None:
    close(whiten(torch.tensor([5.0, 3.0, 7.0]), torch.tensor([False, True, False]), config), expected)


@pytest.mark.parametrize("of_one", ["zero", "raw"])
def test_two_sampled_tokens_are_whitened_either_way(of_one: Any) -> None:
    # 1 and 3: mean 2, unbiased variance 2.
    found = whiten(torch.tensor([1.0, 9.0, 3.0]), torch.tensor([True, False, True]), WhitenConfig(of_one=of_one))

    close(found, [-(0.5**0.5), 0.0, 0.5**0.5])
