"""Policy losses at single tokens, as published."""

from typing import Any

import pytest
import torch
from torch import Tensor

from flotilla.services.trainer.algorithms.losses import policy_loss
from flotilla.services.trainer.algorithms.sequences import PackedSequences
from flotilla.shared.config.sections.algorithm import (
    AlgorithmConfig,
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
