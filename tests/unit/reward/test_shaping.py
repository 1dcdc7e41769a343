"""Rewards on their way to the trainer: shaping, normalisation, filtering, masks, weights and resampling."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from flotilla.services.reward.filtering import keeps, sample_mask
from flotilla.services.reward.normalisation import StatisticsConfig, normalise
from flotilla.services.reward.shaping import (
    Graded,
    length_reward,
    overlong_penalty,
    repetition_penalty,
    shape,
    truncated_reward,
)
from flotilla.services.trainer.algorithms.preference import dpo_loss, pairwise_loss
from flotilla.services.trainer.algorithms.sample_weights import filtration_weights, redraw, resample, sequence_weights
from flotilla.shared.config.sections.algorithm import BestResamplingConfig, PowerResamplingConfig
from flotilla.shared.config.sections.shaping import (
    GroupFilterConfig,
    LengthRewardConfig,
    MeanInRangeConfig,
    OverlongConfig,
    RepetitionConfig,
    SampleMaskConfig,
    ShapingConfig,
    SpreadAboveConfig,
    TruncatedConfig,
)
from flotilla.shared.statistics.moments import RunningMoments


@pytest.mark.parametrize(
    ("length", "penalty", "capped"),
    [(12_000, 0, 0), (16_384, 0, 0), (18_000, -0.394531, -0.394531), (20_480, -1, -1), (22_000, -1.371094, -1)],
)
def test_the_overlong_penalty_grows_over_the_buffer(length: int, penalty: float, capped: float) -> None:
    config = OverlongConfig(max_length=20_480, buffer=4_096, capped=False)

    assert overlong_penalty(length, config) == pytest.approx(penalty, abs=1e-6)
    assert overlong_penalty(length, config.model_copy(update={"capped": True})) == pytest.approx(capped, abs=1e-6)


def test_a_truncated_answer_is_scaled_or_replaced() -> None:
    assert truncated_reward(0.8, TruncatedConfig(scale=0.5)) == 0.4
    assert truncated_reward(0.8, TruncatedConfig(value=-1.0)) == -1.0


def test_length_and_repetition() -> None:
    assert length_reward(25, LengthRewardConfig(min_length=10, max_length=40)) == pytest.approx(-0.25)
    assert repetition_penalty("q q q q q q", RepetitionConfig(ngram=2)) == pytest.approx(-0.8)
    assert repetition_penalty("one", RepetitionConfig(ngram=2)) == 0


def test_shaping_runs_in_its_stated_order() -> None:
    config = ShapingConfig(
        overlong=OverlongConfig(max_length=10, buffer=5),
        truncated=TruncatedConfig(scale=0.5),
        scale=2.0,
        normalisation=StatisticsConfig(mean="batch"),
        clip=0.6,
    )

    shaped = shape([Graded(1.0, 10, is_truncated=True), Graded(1.0, 5)], config)

    # (1 - 1) * 0.5 * 2 = 0 and 1 * 2 = 2; less the mean 1; clipped.
    assert shaped.rewards.tolist() == [-0.6, 0.6]
    assert shaped.clip_fraction == 1.0


def test_a_group_statistic_is_the_groups_own() -> None:
    """Upstream mixes the deviations of all groups when the mean is the batch's."""
    config = StatisticsConfig(mean="batch", std="group")

    found = normalise([0.0, 2.0, 0.0, 4.0], [0, 0, 1, 1], config)

    np.testing.assert_allclose(
        found, [-1.5 / np.sqrt(2), 0.5 / np.sqrt(2), -1.5 / np.sqrt(8), 2.5 / np.sqrt(8)], rtol=1e-5
    )


@pytest.mark.parametrize(("degenerate", "expected"), [("epsilon", 0.0), ("zero", 0.0)])
def test_equal_rewards_normalise_to_zero(degenerate: Any, expected: float) -> None:
    for over in ("group", "batch"):
        config = StatisticsConfig(mean=over, std=over, degenerate=degenerate, epsilon=1e-300)

        for count, reward in ((2, 0.5), (8, 0.7), (3, 0.1), (10, 0.1), (7, -0.3)):
            assert set(normalise([reward] * count, [0] * count, config).tolist()) <= {expected}


def test_asym_clip_bounds_what_was_normalised() -> None:
    config = StatisticsConfig(mean="batch", std="batch", clip=(-1.0, 3.0))

    found = normalise([0.0] + [1.0] * 20, [0] * 21, config)

    assert found.min() == -1.0


@settings(max_examples=40, deadline=None, derandomize=True)
@given(batches=st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=5), min_size=1, max_size=5))
def test_running_moments_are_those_of_all_rewards(batches: list[list[float]]) -> None:
    moments = RunningMoments()
    for batch in batches:
        moments = moments.updated(batch)

    everything = np.concatenate(batches)
    assert moments.mean == pytest.approx(everything.mean(), abs=1e-9)
    assert moments.variance == pytest.approx(everything.var(), abs=1e-9)


def test_running_statistics_need_moments() -> None:
    with pytest.raises(ValueError, match="moments"):
        normalise([1.0], [0], StatisticsConfig(mean="running"))


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (MeanInRangeConfig(), ["mixed", "equal tenths"]),
        (MeanInRangeConfig(keep_single=True), ["mixed", "one", "equal tenths"]),
        (MeanInRangeConfig(low=None, high=0.9), ["wrong", "mixed", "equal tenths"]),
        (SpreadAboveConfig(), ["mixed", "one"]),
        (SpreadAboveConfig(keep_single=False), ["mixed"]),
        (SpreadAboveConfig(statistic="std", threshold=0.9), ["one"]),
    ],
)
def test_group_filters(config: GroupFilterConfig, kept: list[str]) -> None:
    groups = {"right": [1.0, 1], "wrong": [0.0, 0], "mixed": [0.0, 1, 1], "one": [1.0], "equal tenths": [0.1] * 3}

    assert [name for name, rewards in groups.items() if keeps(rewards, config)] == kept


@pytest.mark.parametrize(
    ("rewards", "bound", "kept"),
    [
        # 0.1 as float32 is 0.100000001490: above a bound of 0.1, as its mean is, and ROLL's too.
        ([0.1, 0.1], 0.1, True),
        ([0.25, 0.75], 0.5, False),
        ([0.2, 0.2, 0.2], 0.2, True),
        ([0.9, 0.9, 0.9], 0.9, False),
    ],
)
def test_a_mean_that_equals_its_bound_is_compared_as_float32(rewards: list[float], bound: float, *, kept: bool) -> None:
    # 0.9 as float32 is 0.899999976: below 0.9.
    assert keeps(rewards, MeanInRangeConfig(low=bound, high=None)) is kept


def test_a_sample_mask_combines_its_rules() -> None:
    config = SampleMaskConfig(truncated=True, max_length=8, difficulty=(0.1, 0.9), wrong_up_to_length=6)

    kept = sample_mask([1, 0, 0, 1, 1, 1], [3, 5, 7, 8, 2, 2], [0, 0, 0, 0, 1, 1], config)

    assert kept.tolist() == [True, True, False, False, False, False]


@pytest.mark.parametrize(
    ("model", "section"),
    [
        (ShapingConfig, {"normalisation": {"mean": None}}),
        (ShapingConfig, {"normalisation": {"mean": "group", "degenerate": "zero"}}),
        (ShapingConfig, {"normalisation": {"mean": None, "std": "group", "std_of": "centred"}}),
        (ShapingConfig, {"truncated": {}}),
        (ShapingConfig, {"overlong": {"max_length": 4, "buffer": 5}}),
        (SampleMaskConfig, {}),
        (SampleMaskConfig, {"max_length": 5}),
        (GroupFilterConfig, {"kind": "mean_in_range", "low": 1, "high": 0}),
        (GroupFilterConfig, {"kind": "mean_in_range", "low": None, "high": None}),
    ],
)
def test_sections_without_effect_are_refused(model: Any, section: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(model).validate_python(section)


def test_sample_weights_have_mean_1() -> None:
    weights = sequence_weights(torch.tensor([0.1, 0.9]), torch.tensor([10, 4]))

    assert weights is not None
    assert float(weights.mean()) == pytest.approx(1, abs=1e-6)
    assert weights[1] > weights[0]
    assert sequence_weights(None, None) is None


def test_resampling_draws_by_weight() -> None:
    weights = filtration_weights(torch.tensor([0.0, 3.0, 0.0]))

    drawn = resample(weights, torch.Generator().manual_seed(0))

    assert drawn.tolist() == [1, 1, 1]


def test_a_draw_depends_on_the_seed_alone_and_by_the_power_on_large_rewards() -> None:
    scores = torch.tensor([1.0, -3.0] * 1000)

    drawn = redraw(PowerResamplingConfig(power=2.0), scores, seed=5)
    best = redraw(BestResamplingConfig(), scores, seed=5)

    assert torch.equal(drawn, redraw(PowerResamplingConfig(power=2.0), scores, seed=5))
    assert not torch.equal(drawn, redraw(PowerResamplingConfig(power=2.0), scores, seed=6))
    assert float((scores[drawn] == -3).float().mean()) == pytest.approx(0.9, abs=0.03)
    assert float((scores[best] == 1).float().mean()) == pytest.approx(0.8, abs=0.04)


def test_preferring_the_chosen_answer_lowers_the_loss() -> None:
    zero = torch.zeros(2)

    better = dpo_loss(zero + 1, zero - 1, zero, zero, beta=0.5)
    worse = dpo_loss(zero - 1, zero + 1, zero, zero, beta=0.5)

    assert better.loss < worse.loss
    assert pairwise_loss(zero + 1, zero) < pairwise_loss(zero + 1, zero, margin=zero + 0.5)
