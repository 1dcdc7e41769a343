"""What every policy loss returns, and the ratio that most of them start from."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flotilla.services.trainer.algorithms.sequences import PackedSequences


@dataclass(frozen=True, eq=False)
class TokenLoss:
    """A loss per token before correction and aggregation.

    Args:
        values: [T], differentiable, meaningless where the mask is False.
        clipped: [T] bool, tokens whose gradient a clip, gate or trust region stopped or changed.
        clipped_lower: [T] bool, tokens where the dual clip bounds the loss.
        per_sequence: whether ``values`` is one number per sequence given to each of its tokens.
    """

    values: Tensor
    clipped: Tensor | None = None
    clipped_lower: Tensor | None = None
    per_sequence: bool = False


def log_ratio(log_probs: Tensor, old_log_probs: Tensor, clamp: float | None) -> Tensor:
    """Compute x = log_probs - old_log_probs [T], bounded to [-clamp, clamp]."""
    x = log_probs.float() - old_log_probs.float()
    return x if clamp is None else x.clamp(-clamp, clamp)


def shared_log_ratio(
    log_probs: Tensor,
    old_log_probs: Tensor,
    sequences: PackedSequences,
    *,
    level: Literal["sequence", "segment"],
    gradient: Literal["token", "sequence"],
    clamp: float | None,
) -> Tensor:
    """Average x over each sequence or segment and give every token that mean.

    Args:
        log_probs: [T] with gradient.
        old_log_probs: [T].
        sequences: which tokens count.
        level: what shares the mean.
        gradient: ``sequence``: flows through the mean; ``token``: straight-through, each token's own log-prob.
        clamp: upper bound on the mean, None for none; below, the exponential needs none.

    Returns:
        [T]; 0 where the mask is False.
    """
    x = torch.where(sequences.response_mask, log_probs.float() - old_log_probs.float(), 0.0)
    spans = sequences if level == "sequence" else sequences.segments
    shared = spans.spread(spans.mean(x))
    if gradient == "token":
        shared = log_probs.float() - log_probs.float().detach() + shared.detach()
    shared = torch.where(sequences.response_mask, shared, 0.0)
    return shared if clamp is None else shared.clamp(max=clamp)
