"""Loss weights of whole sequences, from difficulty and length, with mean 1 over the batch they are computed on.

PF-PPO: resample a batch so that confident rewards appear more often.

Source: Shen et al., Policy Filtration in RLHF to Fine-Tune LLM for Code Generation, 2024.
"""

from typing import Literal

import torch
from torch import Tensor

from flotilla.shared.config.sections.algorithm import PowerResamplingConfig, ResamplingConfig

SMALLEST_WEIGHT = 1e-8


def filtration_weights(
    scores: Tensor, *, method: Literal["pow", "max_min", "max_random"] = "pow", power: float = 2.0
) -> Tensor:
    """Weigh sequences for resampling.

    Args:
        scores: [S] rewards.
        method: ``pow``: |score|^power; ``max_min``: the batch's largest and smallest scores 1, others 0;
            ``max_random``: the largest 0.4, others 0.1.
        power: for ``pow``.

    Returns:
        [S], at least 1e-8.
    """
    scores = scores.float()
    match method:
        case "pow":
            weights = scores.abs().pow(power)
        case "max_min":
            weights = ((scores == scores.max()) | (scores == scores.min())).float()
        case "max_random":
            weights = torch.where(scores == scores.max(), 0.4, 0.1)
    return (weights + SMALLEST_WEIGHT).clamp(min=SMALLEST_WEIGHT)


def resample(weights: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw as many sequences as there are, with replacement, by weight: [S] int64 indices."""
    return torch.multinomial(weights, weights.numel(), replacement=True, generator=generator)


def redraw(config: ResamplingConfig, scores: Tensor, seed: int) -> Tensor:
    """Draw a step's sequences again.

    Args:
        config: by which weights.
        scores: [S] rewards.
        seed: the same seed and rewards give the same draw, on any device.

    Returns:
        [S] int64 on the device of ``scores``: the sequence that each place of the step takes.
    """
    power = config.power if isinstance(config, PowerResamplingConfig) else 1.0
    weights = filtration_weights(scores.cpu(), method=config.kind, power=power)
    return resample(weights, torch.Generator().manual_seed(seed)).to(scores.device)


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
