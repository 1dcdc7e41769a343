"""Losses that bound a ratio by clipping: PPO, GSPO, GMPO, and PPO with covariance selection."""

import torch
from torch import Tensor

from services.trainer.algorithms.losses.token_loss import TokenLoss, log_ratio, shared_log_ratio
from services.trainer.algorithms.sequences import PackedSequences
from shared.config.policy_loss import ClipCovConfig, GmpoConfig, GspoConfig, KlCovConfig, PpoConfig


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


def token_covariance(log_probs: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
    """Compute (A - mean A)(log_prob - mean log_prob) [T] without gradient, means over the sampled tokens given."""
    count = response_mask.sum().clamp(min=1)
    log_probs = log_probs.detach().float()
    mean_advantage = torch.where(response_mask, advantages, 0.0).sum() / count
    mean_log_prob = torch.where(response_mask, log_probs, 0.0).sum() / count
    return (advantages - mean_advantage) * (log_probs - mean_log_prob)


def clip_cov_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    sequences: PackedSequences,
    config: ClipCovConfig,
    generator: torch.Generator | None = None,
) -> TokenLoss:
    """Compute PPO's loss with tokens of strong covariance drawn at random and dropped.

    Tokens that the clip already stops are no candidates. Means and counts are over the tokens given, so this loss
    depends on the micro-batch unless the mini-batch is one.

    Source: Cui et al., The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models, 2025.
    """
    ratio = log_ratio(log_probs, old_log_probs, config.log_ratio_clamp).exp()
    base = clipped_surrogate(ratio, advantages, clip_low=config.clip_low, clip_high=config.clip_high, dual_clip=None)
    mask = sequences.response_mask
    covariance = token_covariance(log_probs, advantages, mask)
    candidates = mask & (covariance > config.lower) & (covariance < config.upper) & ~_known(base.clipped)
    order = torch.rand(covariance.shape, generator=generator, device=covariance.device)
    dropped = candidates & _first(torch.where(candidates, order, torch.inf), _quota(config.fraction, mask))
    return TokenLoss(torch.where(dropped, 0.0, base.values), dropped)


def kl_cov_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, sequences: PackedSequences, config: KlCovConfig
) -> TokenLoss:
    """Compute -A r, plus coefficient |x| on the tokens of highest covariance among those given.

    Source: Cui et al., The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models, 2025.
    """
    x = log_ratio(log_probs, old_log_probs, config.log_ratio_clamp)
    mask = sequences.response_mask
    covariance = torch.where(mask, token_covariance(log_probs, advantages, mask), -torch.inf)
    penalised = mask & _first(-covariance, _quota(config.fraction, mask))
    plain = -advantages * x.exp()
    return TokenLoss(torch.where(penalised, plain + config.coefficient * x.abs(), plain), penalised)


def _known(clipped: Tensor | None) -> Tensor:
    assert clipped is not None
    return clipped


def _quota(fraction: float, mask: Tensor) -> Tensor:
    return (fraction * mask.sum().double()).floor().clamp(min=1)


def _first(keys: Tensor, quota: Tensor) -> Tensor:
    """Mark the ``quota`` smallest of [T] keys, without reading anything back from the device."""
    rank = torch.empty_like(keys, dtype=torch.long)
    rank[keys.argsort()] = torch.arange(keys.numel(), device=keys.device)
    return rank < quota
