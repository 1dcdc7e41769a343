"""Losses that bound a ratio by clipping: PPO, GSPO, GMPO."""

import torch
from torch import Tensor

from flotilla.services.trainer.algorithms.losses.token_loss import TokenLoss, log_ratio, shared_log_ratio
from flotilla.services.trainer.algorithms.sequences import PackedSequences
from flotilla.shared.config.sections.policy_loss import GmpoConfig, GspoConfig, PpoConfig


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> TokenLoss:
    """Take the worse of the plain and the clipped surrogate: max(-A r, -A clip(r, 1-clip_low, 1+clip_high)).

    With ``dual_clip`` c, tokens of negative advantage lose at most -A c.

    Args:
        ratio: [T] with gradient.
        advantages: [T].
        clip_low: width below 1.
        clip_high: width above 1.
        dual_clip: c > 1, or None.

    Source: Schulman et al., PPO, 2017, eq. 7; Ye et al., Mastering Complex Control in MOBA Games, 2020 (dual clip).
    """
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss, clipped = torch.maximum(plain, bounded), bounded > plain
    if dual_clip is None:
        return TokenLoss(loss, clipped)
    ceiling = -advantages * dual_clip
    is_bounded = (advantages < 0) & (loss > ceiling)
    return TokenLoss(torch.where(is_bounded, ceiling, loss), clipped, is_bounded)


def ppo_loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: PpoConfig) -> TokenLoss:
    """Compute PPO's clipped loss [T] on a ratio per token."""
    ratio = log_ratio(log_probs, old_log_probs, config.log_ratio_clamp).exp()
    return clipped_surrogate(
        ratio, advantages, clip_low=config.clip_low, clip_high=config.clip_high, dual_clip=config.dual_clip
    )


def gspo_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, sequences: PackedSequences, config: GspoConfig
) -> TokenLoss:
    """Compute PPO's clipped loss [T] on one ratio per sequence or segment.

    Source: Zheng et al., Group Sequence Policy Optimization, 2025.
    """
    ratio = shared_log_ratio(
        log_probs,
        old_log_probs,
        sequences,
        level=config.level,
        gradient=config.gradient,
        clamp=config.log_ratio_clamp,
    ).exp()
    if config.mean_advantages:
        spans = sequences if config.level == "sequence" else sequences.segments
        advantages = spans.spread(spans.mean(advantages))
    return clipped_surrogate(
        ratio, advantages, clip_low=config.clip_low, clip_high=config.clip_high, dual_clip=config.dual_clip
    )


def gmpo_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, sequences: PackedSequences, config: GmpoConfig
) -> TokenLoss:
    """Compute -A r per sequence, r the geometric mean of ratios clipped against the sign of A, A the sequence's mean.

    Returns one value per sequence, given to each of its tokens: seq-mean-token-mean is the paper's aggregation.

    Source: Zhao et al., Geometric-Mean Policy Optimization, 2025.
    """
    x = torch.where(sequences.response_mask, log_ratio(log_probs, old_log_probs, config.log_ratio_clamp), 0.0)
    sign = advantages.sign()
    bounded = x.clamp(-config.clip_low, config.clip_high)
    pessimistic = sign * torch.minimum(sign * x, sign * bounded)
    ratio = sequences.mean(pessimistic).exp()
    loss = -sequences.mean(advantages) * ratio
    return TokenLoss(sequences.spread(loss), (pessimistic != x) & (sign != 0), per_sequence=True)
