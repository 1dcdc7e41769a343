"""Whitening over the sampled tokens of a whole batch, whichever ranks hold them."""

from collections.abc import Callable

import torch
from torch import Tensor

from flotilla.shared.config.sections.advantage import WhitenConfig

AllSum = Callable[[Tensor], Tensor]


def on_one_rank(values: Tensor) -> Tensor:
    """Stand in for a sum across ranks where there is one."""
    return values


def whiten(values: Tensor, mask: Tensor, config: WhitenConfig, all_sum: AllSum = on_one_rank) -> Tensor:
    """Shift to mean 0 and scale to variance 1 over the tokens where the mask holds.

    Args:
        values: [T].
        mask: [T] bool.
        config: variance, floor and epsilon.
        all_sum: sums a tensor across the ranks that share the batch.

    Returns:
        [T] float32, 0 where the mask is False. One token alone, or none, is only centred (unbiased variance is not
        defined).
    """
    # In float64 sums of equal float32 values are exact, and so is their mean: what is equal becomes exactly 0.
    inside = torch.where(mask, values.double(), 0.0)
    count, total = all_sum(torch.stack([mask.sum().double(), inside.sum()])).unbind()
    centred = torch.where(mask, inside - total / count.clamp(min=1), 0.0)
    if config.centre_only:
        return centred.float()
    squares = all_sum(centred.square().sum())
    variance = squares / (count - 1 if config.variance == "unbiased" else count).clamp(min=1)
    floored = variance + config.epsilon if config.floor == "add" else variance.clamp(min=config.epsilon)
    return (centred * floored.rsqrt()).float()
