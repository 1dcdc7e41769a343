"""Importance weights, rejection and vetoes by their definitions, and what is measured of a mismatch."""

import math

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
