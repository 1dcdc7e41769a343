"""Loss weights of whole sequences, from difficulty and length, with mean 1 over the batch they are computed on."""

import torch
from torch import Tensor


def difficulty_weights(difficulty: Tensor) -> Tensor:
    """Weigh hard tasks more: 0.5 + 1.5 clip(difficulty, 0, 1); [S] to [S]."""
    return 0.5 + 1.5 * difficulty.float().clamp(0.0, 1.0)


def length_weights(lengths: Tensor) -> Tensor:
    """Weigh short answers more: from 1.5 for the shortest to 0.5 for the longest; [S] sampled tokens to [S]."""
    lengths = lengths.float()
    return 1.5 - (lengths - lengths.min()) / (lengths.max() - lengths.min() + 1e-8)


def sequence_weights(difficulty: Tensor | None, lengths: Tensor | None) -> Tensor | None:
    """Multiply the weights that are asked for and rescale them to mean 1.

    To be computed on the whole mini-batch: on a micro-batch the rescaling would depend on how it was cut.

    Args:
        difficulty: [S] in [0, 1], or None.
        lengths: [S] sampled tokens, or None.

    Returns:
        [S], or None if neither is given.

    Source: ROLL, difficulty_loss_weight and length_loss_weight.
    """
    parts = []
    if difficulty is not None:
        parts.append(difficulty_weights(difficulty))
    if lengths is not None:
        parts.append(length_weights(lengths))
    if not parts:
        return None
    product = torch.stack(parts).prod(0)
    return product / (product.mean() + 1e-8)
