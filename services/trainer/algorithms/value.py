"""The critic's loss per token."""

import torch
from torch import Tensor

from services.trainer.algorithms.losses.token_loss import TokenLoss


def value_loss(value_preds: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None) -> TokenLoss:
    """Compute 0.5 max((v-R)^2, (clip(v, v_old +- clip) - R)^2) [T].

    Args:
        value_preds: [T] with gradient.
        old_values: [T] before the step.
        returns: [T] targets.
        clip: how far a value may move and still count; None for the plain squared error.

    Source: Schulman et al., PPO2 (OpenAI baselines), 2017.
    """
    plain = (value_preds.float() - returns).square()
    if clip is None:
        return TokenLoss(0.5 * plain)
    bounded = (torch.clamp(value_preds.float(), old_values - clip, old_values + clip) - returns).square()
    return TokenLoss(0.5 * torch.maximum(plain, bounded), bounded > plain)


def explained_variance(values: Tensor, returns: Tensor, response_mask: Tensor) -> Tensor:
    """Compute 1 - var(R - v) / var(R) over the sampled tokens: 1 is perfect, 0 no better than the mean."""
    residual, target = (returns - values)[response_mask], returns[response_mask]
    return 1 - residual.var(correction=0) / (target.var(correction=0) + 1e-5)
