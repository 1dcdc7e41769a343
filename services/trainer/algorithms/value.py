"""The critic's loss per token, and the scale of what it predicts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flotilla.services.trainer.algorithms.losses.token_loss import TokenLoss


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


@dataclass(frozen=True, eq=False)
class ReturnMoments:
    """Mean and variance of every return so far, so that a critic may predict whitened ones; float64 scalars.

    Args:
        count: returns seen.
        mean: of them.
        variance: of the population.
    """

    count: Tensor
    mean: Tensor
    variance: Tensor

    @classmethod
    def none(cls) -> "ReturnMoments":
        """Start with nothing seen: whitening then changes nothing."""
        zero = torch.zeros((), dtype=torch.float64)
        return cls(zero, zero, zero)

    def updated(self, returns: Tensor, response_mask: Tensor) -> "ReturnMoments":
        """Merge the returns [T] of sampled tokens."""
        seen = returns[response_mask].double().cpu()
        if not seen.numel():
            return self
        count = self.count + seen.numel()
        difference = seen.mean() - self.mean
        squares = self.variance * self.count + seen.var(correction=0) * seen.numel()
        squares = squares + difference.square() * self.count * seen.numel() / count
        return ReturnMoments(count, self.mean + difference * seen.numel() / count, squares / count)

    def whiten(self, returns: Tensor) -> Tensor:
        """Bring returns [T] to mean 0 and variance 1."""
        return (returns - float(self.mean)) / self._scale

    def restore(self, values: Tensor) -> Tensor:
        """Bring predictions [T] of whitened returns back to the returns' own scale."""
        return values * self._scale + float(self.mean)

    @property
    def _scale(self) -> float:
        return float((self.variance + 1e-8).sqrt()) if float(self.count) else 1.0
