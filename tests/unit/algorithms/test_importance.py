"""Importance weights, rejection and vetoes by their definitions, and what is measured of a mismatch."""

import math
from typing import Any

import pytest
import torch

from flotilla.services.trainer.algorithms.importance import (
    correct,
    importance_weights,
    kept_by,
    kept_by_veto,
    mismatch_metrics,
)
from flotilla.services.trainer.algorithms.metrics import summarise
from flotilla.services.trainer.algorithms.sequences import PackedSequences
from flotilla.shared.config.sections.algorithm import (
    CorrectionConfig,
    RejectionConfig,
    VetoConfig,
    WeightConfig,
)


def row(length: int) -> PackedSequences:
    return PackedSequences(torch.zeros(length, dtype=torch.long), torch.ones(length, dtype=torch.bool), 1)


X = torch.tensor([0.5, -0.5, 1.0])


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (WeightConfig(), [1.648721, 0.606531, 2.0]),
        (WeightConfig(level="sequence"), [2.0, 2.0, 2.0]),
        (WeightConfig(level="geometric"), [math.exp(1 / 3)] * 3),
        (WeightConfig(lower=0.5, outside="zero"), [1.648721, 0.606531, 0.0]),
        (WeightConfig(upper=None), [1.648721, 0.606531, math.e]),
        (WeightConfig(lower=0.8, upper=None), [1.648721, 0.8, math.e]),
    ],
)
def test_importance_weights(config: WeightConfig, expected: list[float]) -> None:
    torch.testing.assert_close(importance_weights(X, row(3), config), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_the_effective_sample_size_of_truncated_weights() -> None:
    found = correct(CorrectionConfig(), X - 3, torch.full((3,), -3.0), row(3))

    assert summarise(found.metrics)["correction/effective_sample_size"] == pytest.approx(0.851762, rel=1e-5)


def test_weights_that_are_all_zero_have_no_effective_sample() -> None:
    config = CorrectionConfig(weight=WeightConfig(lower=5.0, upper=9.0, outside="zero"))

    assert (
        summarise(correct(config, X - 3, torch.full((3,), -3.0), row(3)).metrics)["correction/effective_sample_size"]
        == 0
    )


def test_statistics_of_a_sequence() -> None:
    mean_k1 = RejectionConfig(statistic="k1", scope="sequence", lower=-0.3334, upper=-0.3333)
    mean_k3 = RejectionConfig(statistic="k3", scope="sequence", lower=0.3245, upper=0.3246)

    for test in (mean_k1, mean_k3):
        assert kept_by(test, X - 3, torch.full((3,), -3.0), row(3)).all()


def test_one_bad_token_vetoes_its_sequence_alone() -> None:
    sequences = PackedSequences.of(torch.tensor([0, 0, 1, 1]), torch.tensor([1, 1, 1, 0]))

    kept = kept_by_veto(VetoConfig(lower=1e-4), torch.tensor([0.0, -12.0, 0.1, -50.0]), sequences)

    assert kept.tolist() == [False, False, True, True]


def test_mismatch_is_zero_for_the_same_policy() -> None:
    log_probs = torch.tensor([-0.1, -2.0, -3.0])

    summary = summarise(mismatch_metrics(log_probs, log_probs, row(3)))

    assert summary["correction/kl"] == summary["correction/k3_kl"] == summary["correction/chi2_token"] == 0


@pytest.mark.parametrize(
    ("over", "kept"),
    [
        # Geometric mean of 2, 1.1 and 1.1: 2.42 ** (1 / 3) = 1.34, above 1.2.
        ("original", [False, False, False]),
        # The token of ratio 2 is gone: 1.1.
        ("surviving", [False, True, True]),
    ],
)
def test_a_sequence_is_tested_by_all_its_tokens_or_by_those_that_are_left(over: Any, kept: list[bool]) -> None:
    tests = (
        RejectionConfig(scope="sequence", reduce="mean", lower=0.8, upper=1.2),
        RejectionConfig(lower=0.7, upper=1.4),
    )
    config = CorrectionConfig(weight=None, rejections=tests, statistics_over=over)
    log_ratios = torch.tensor([2.0, 1.1, 1.1]).log()

    assert correct(config, log_ratios - 3, torch.full((3,), -3.0), row(3)).response_mask.tolist() == kept


def test_all_corrections_at_once_are_by_hand() -> None:
    # Ratios of four answers: one with a token that vetoes it, one with a token too many, one far off as a whole.
    ratios = [[1.1, 4.0, 1.0], [2.0, 1.1, 1.1], [1.3, 1.3, 1.3], [0.9, 1.0, 0.6]]
    sequences = PackedSequences.of(torch.arange(4).repeat_interleave(3), torch.ones(12))
    config = CorrectionConfig(
        weight=WeightConfig(upper=1.05),
        rejections=(
            RejectionConfig(lower=0.7, upper=1.4),
            RejectionConfig(scope="sequence", reduce="mean", lower=0.8, upper=1.2),
        ),
        veto=VetoConfig(lower=0.3, upper=3.0),
        statistics_over="surviving",
    )

    found = correct(config, torch.tensor(ratios).flatten().log() - 3, torch.full((12,), -3.0), sequences)

    assert found.response_mask.reshape(4, 3).int().tolist() == [[0, 0, 0], [0, 1, 1], [0, 0, 0], [1, 1, 0]]
    kept = found.weights[found.response_mask]
    torch.testing.assert_close(kept, torch.tensor([1.05, 1.05, 0.9, 1.0]))


def test_a_weight_of_a_sequence_is_of_the_tokens_that_are_left() -> None:
    config = CorrectionConfig(
        weight=WeightConfig(level="sequence", upper=3.0),
        rejections=(RejectionConfig(upper=1.4),),
        statistics_over="surviving",
    )

    found = correct(config, torch.tensor([2.0, 1.1, 1.2]).log() - 3, torch.full((3,), -3.0), row(3))

    torch.testing.assert_close(found.weights, torch.tensor([0.0, 1.32, 1.32]))


def test_what_is_left_matters_to_nothing_without_both_kinds_of_tests() -> None:
    for tests in ((RejectionConfig(upper=1.4),), (RejectionConfig(scope="sequence", upper=1.4),)):
        with pytest.raises(ValueError, match="statistics_over surviving has no effect"):
            CorrectionConfig(rejections=tests, statistics_over="surviving")
