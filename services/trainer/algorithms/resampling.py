"""PF-PPO: resample a batch so that confident rewards appear more often.

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
