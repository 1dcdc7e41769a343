"""Policy losses at single tokens, as published; KL, value, correction and metrics by their definitions."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flotilla.services.trainer.algorithms.aggregation import Denominators, aggregate
from flotilla.services.trainer.algorithms.importance import (
    correct,
    importance_weights,
    kept_by,
    kept_by_veto,
    mismatch_metrics,
)
from flotilla.services.trainer.algorithms.kl import exact_kl, kl_estimate, kl_loss, updated_coefficient
from flotilla.services.trainer.algorithms.losses import policy_loss
from flotilla.services.trainer.algorithms.metrics import Tally, combine, summarise
from flotilla.services.trainer.algorithms.objective import value_objective
from flotilla.services.trainer.algorithms.sequences import PackedSequences
from flotilla.services.trainer.algorithms.value import ReturnMoments, explained_variance
from flotilla.shared.config.sections.algorithm import (
    AggregationConfig,
    AlgorithmConfig,
    CorrectionConfig,
    KlLossConfig,
    KlRewardConfig,
    RejectionConfig,
    ValueLossConfig,
    VetoConfig,
    WeightConfig,
)


def row(length: int) -> PackedSequences:
    return PackedSequences(torch.zeros(length, dtype=torch.long), torch.ones(length, dtype=torch.bool), 1)


def losses(kind: dict[str, Any], x: list[float], advantage: float) -> Tensor:
    """Token losses where the old log-prob is -3 and x is the log-ratio."""
    config = AlgorithmConfig.model_validate({"policy_loss": kind}).policy_loss
    old = torch.full((len(x),), -3.0)
    return policy_loss(config, old + torch.tensor(x), old, torch.full((len(x),), advantage), row(len(x))).values


PPO = {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}


@pytest.mark.parametrize(
    ("x", "advantage", "expected"),
    [(0.5, 1, -1.2), (0.5, -1, 1.648721), (-0.5, 1, -0.606531), (-0.5, -1, 0.8), (1.5, -1, 3.0), (0.1, 1, -1.105171)],
)
def test_ppo_with_dual_clip(x: float, advantage: float, expected: float) -> None:
    assert float(losses(PPO, [x], advantage)) == pytest.approx(expected, rel=1e-5)


def test_gspo_clips_the_geometric_mean() -> None:
    found = losses({"kind": "gspo", "clip_low": 0.05, "clip_high": 0.05}, [0.1, -0.2, 0.4], 1.0)

    torch.testing.assert_close(found, torch.full((3,), -1.05))


@pytest.mark.parametrize(("x", "weight"), [(0.5, 1.2), (-0.5, 0.8), (0.1, 1.105171)])
def test_cispo_weighs_by_the_clipped_ratio(x: float, weight: float) -> None:
    found = losses({"kind": "cispo", "clip_high": 0.2}, [x], 1.0)

    assert float(found) == pytest.approx(-weight * (-3 + x), rel=1e-5)


@pytest.mark.parametrize(
    ("x", "advantage", "expected"), [(0, 1, -2.0), (0, -1, 1.904762), (0.5, 1, -2.626889), (0.5, -1, 2.529512)]
)
def test_sapo_gates_softly(x: float, advantage: float, expected: float) -> None:
    assert float(losses({"kind": "sapo"}, [x], advantage)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("advantage", "ratio"), [(1.0, 0.967216), (-1.0, 1.105171)])
def test_gmpo_clips_against_the_sign_of_the_advantage(advantage: float, ratio: float) -> None:
    found = losses({"kind": "gmpo"}, [0.6, -0.6, 0.1], advantage)

    torch.testing.assert_close(found, torch.full((3,), -advantage * ratio), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ({"kind": "policy_gradient"}, [-1.0, 1.0]),
        ({"kind": "ppo"}, [-1.0, 1.0]),
        ({"kind": "gspo"}, [-1.0, 1.0]),
        ({"kind": "cispo"}, [-1.0, 1.0]),
        ({"kind": "sapo", "tau_negative": 1.0}, [-1.0, 1.0]),
        ({"kind": "dppo"}, [-1.0, 1.0]),
        ({"kind": "dro"}, [-1.0, 1.0]),
    ],
)
def test_at_ratio_1_the_gradient_is_the_policy_gradient(kind: dict[str, Any], expected: list[float]) -> None:
    config = AlgorithmConfig.model_validate({"policy_loss": kind}).policy_loss
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    sequences = PackedSequences(torch.tensor([0, 1]), torch.ones(2, dtype=torch.bool), 2)

    loss = policy_loss(config, log_probs, log_probs.detach(), torch.tensor([1.0, -1.0]), sequences)
    (gradient,) = torch.autograd.grad(loss.values.sum(), [log_probs])

    torch.testing.assert_close(gradient, torch.tensor(expected))


def test_topr_needs_scores() -> None:
    with pytest.raises(ValueError, match="scores"):
        losses({"kind": "topr"}, [0.1], 1.0)


def test_covariance_selection_over_the_mini_batch_must_be_given() -> None:
    with pytest.raises(ValueError, match="select_by_covariance"):
        losses({"kind": "kl_cov"}, [0.1], 1.0)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 16 / 6),
        ("token-sum", 16.0),
        ("seq-mean-token-sum", 8.0),
        ("seq-mean-token-mean", 2.5),
        ("seq-mean-token-sum-norm", 2.0),
        ("token-sum-norm", 4.0),
    ],
)
def test_aggregation(mode: Any, expected: float) -> None:
    sequences = PackedSequences.of(torch.tensor([0, 0, 1, 1, 1, 1]), torch.ones(6))
    config = AggregationConfig(mode=mode, fixed_length=4 if mode.endswith("-norm") else None)

    loss = aggregate(torch.tensor([1.0, 3, 2, 2, 2, 6]), sequences, Denominators.of(6, 2), config)

    assert float(loss) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("d", "expected"), [(0.3, (0.3, 0.045, 0.040818)), (-0.3, (-0.3, 0.045, 0.049859)), (25.0, (10.0, 10.0, 10.0))]
)
def test_kl_estimates(d: float, expected: tuple[float, float, float]) -> None:
    for estimator, value in zip(("k1", "k2", "k3"), expected, strict=True):
        found = kl_estimate(torch.tensor([d]), torch.zeros(1), estimator=estimator)  # type: ignore[arg-type]
        assert float(found) == pytest.approx(value, rel=1e-4)


def test_straight_through_keeps_the_value_and_takes_the_gradient_of_k2() -> None:
    log_probs = torch.tensor([-1.0], requires_grad=True)

    kl = kl_loss(log_probs, torch.tensor([-1.4]), KlLossConfig(estimator="k3", gradient="k2"))
    (gradient,) = torch.autograd.grad(kl.sum(), [log_probs])

    assert float(kl.detach()) == pytest.approx(math.exp(-0.4) - 1 + 0.4, rel=1e-4)
    assert float(gradient) == pytest.approx(0.4, rel=1e-4)


def test_estimates_average_to_the_exact_kl() -> None:
    random = torch.Generator().manual_seed(0)
    p, q = (torch.log_softmax(torch.randn(5, generator=random), 0) for _ in range(2))
    weights = p.exp()

    exact = float(exact_kl(p, q))

    for estimator in ("k1", "k3"):
        found = float((weights * kl_estimate(p, q, estimator=estimator, value_clamp=None)).sum())  # type: ignore[arg-type]
        assert found == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize(("observed", "expected"), [(0.15, 0.00102048), (0.09, 0.00098976)])
def test_the_coefficient_follows_the_target(observed: float, expected: float) -> None:
    config = KlRewardConfig(target=0.1)

    assert updated_coefficient(0.001, config, observed_kl=observed, num_sequences=1024) == pytest.approx(expected)
    assert updated_coefficient(0.001, KlRewardConfig(), observed_kl=observed, num_sequences=1024) == 0.001


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


def test_a_clipped_value_loss_takes_the_worse_error() -> None:
    sequences = row(2)

    found = value_objective(
        ValueLossConfig(clip=0.5),
        value_preds=torch.tensor([2.0, 0.1]),
        old_values=torch.zeros(2),
        returns=torch.tensor([2.0, 0.0]),
        response_mask=sequences.response_mask,
        sequence_index=sequences.index,
        denominators=Denominators.of(2, 1),
    )

    assert float(found.loss) == pytest.approx(0.5 * (1.5**2 + 0.1**2) / 2)
    assert summarise(found.metrics)["value_clip_fraction"] == 0.5


def test_explained_variance() -> None:
    returns, mask = torch.tensor([1.0, 2.0, 3.0]), torch.ones(3, dtype=torch.bool)

    assert float(explained_variance(returns, returns, mask)) == pytest.approx(1)
    assert float(explained_variance(torch.full((3,), 2.0), returns, mask)) == pytest.approx(0, abs=1e-4)


def test_tallies_add_up_before_they_are_divided() -> None:
    first = {"a": Tally(torch.tensor(1.0), torch.tensor(1.0))}
    second = {"a": Tally(torch.tensor(8.0), torch.tensor(2.0)), "b": Tally(torch.tensor(0.0), torch.tensor(0.0))}

    assert summarise(combine([first, second])) == {"a": 3.0, "b": 0.0}


def test_moments_of_returns_are_those_of_all_batches() -> None:
    random = torch.Generator().manual_seed(2)
    first, second = (5 + 3 * torch.randn(size, generator=random) for size in (7, 12))
    masks = [torch.ones(7, dtype=torch.bool), torch.arange(12) < 10]

    moments = ReturnMoments.none().updated(first, masks[0]).updated(second, masks[1])

    everything = torch.cat([first, second[:10]])
    assert float(moments.mean) == pytest.approx(float(everything.mean()), rel=1e-5)
    assert float(moments.variance) == pytest.approx(float(everything.var(correction=0)), rel=1e-5)
    torch.testing.assert_close(moments.restore(moments.whiten(first)), first)


def test_without_returns_whitening_changes_nothing() -> None:
    values = torch.tensor([1.0, -2.0])

    assert torch.equal(ReturnMoments.none().restore(values), values)
