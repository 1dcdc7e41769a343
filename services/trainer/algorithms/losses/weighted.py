"""Losses that weigh -A log_prob: plain, CISPO, TOPR, DRO, and the gates and regions of SAPO and DPPO."""

import torch
from torch import Tensor

from flotilla.services.trainer.algorithms.losses.token_loss import TokenLoss, log_ratio, shared_log_ratio
from flotilla.services.trainer.algorithms.sequences import PackedSequences
from flotilla.shared.config.sections.policy_loss import CispoConfig, DppoConfig, DroConfig, SapoConfig, ToprConfig

TINY = 1e-8


def policy_gradient_loss(log_probs: Tensor, advantages: Tensor) -> TokenLoss:
    """Compute -A log_prob [T] (Williams, REINFORCE, 1992)."""
    return TokenLoss(-advantages * log_probs.float())


def cispo_loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: CispoConfig) -> TokenLoss:
    """Compute -clip(r) A log_prob [T] with the clipped ratio as a constant: clipping never stops a gradient.

    Source: MiniMax-M1, 2025, eq. 4; ``drop_outside`` is its unified mask, eq. 7.
    """
    ratio = log_ratio(log_probs.detach(), old_log_probs, config.log_ratio_clamp).exp()
    lower, upper = 1 - config.clip_low, 1 + config.clip_high
    weight = ratio.clamp(lower, upper)
    clipped = ratio != weight
    if config.drop_outside:
        clipped = ((advantages > 0) & (ratio > upper)) | ((advantages < 0) & (ratio < lower))
        weight = torch.where(clipped, 0.0, weight)
    return TokenLoss(-weight * advantages * log_probs.float(), clipped)


def topr_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    sequences: PackedSequences,
    scores: Tensor,
    config: ToprConfig,
) -> TokenLoss:
    """Compute -A log_prob on sequences with a positive score, -clip(r, 0, 1) A log_prob on the others.

    Args:
        log_probs: [T] with gradient.
        old_log_probs: [T] of the sampling policy.
        advantages: [T].
        sequences: layout.
        scores: [S] rewards before any baseline.
        config: the two weights.

    Source: Le Roux et al., Tapered Off-Policy REINFORCE, 2025.
    """
    ratio = log_ratio(log_probs.detach(), old_log_probs, config.log_ratio_clamp).exp()
    is_positive = sequences.spread(scores) > 0
    tapered = config.negative_weight * ratio.clamp(0.0, 1.0)
    weight = torch.where(is_positive, config.positive_weight, tapered)
    return TokenLoss(-weight * advantages * log_probs.float(), ~is_positive & (ratio > 1))


def dro_loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: DroConfig) -> TokenLoss:
    """Compute -A log_prob + beta/2 x^2 [T].

    Source: Richemond et al., Offline Regularised RL for LLM Alignment, 2024; Kimi k1.5, 2025, eq. 3.
    """
    x = log_ratio(log_probs, old_log_probs, None)
    return TokenLoss(-advantages * log_probs.float() + 0.5 * config.beta * x.square())


def sapo_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, sequences: PackedSequences, config: SapoConfig
) -> TokenLoss:
    """Compute -(4/tau) sigmoid(tau (r-1)) A [T], tau by the sign of A.

    At r = 1 its gradient is the policy gradient's; it fades on both sides instead of stopping.

    Source: Gao et al., Soft Adaptive Policy Optimization, 2025.
    """
    if config.level == "sequence":
        x = shared_log_ratio(
            log_probs, old_log_probs, sequences, level="sequence", gradient="sequence", clamp=config.log_ratio_clamp
        )
        advantages = sequences.spread(sequences.mean(advantages))
    else:
        x = log_ratio(log_probs, old_log_probs, config.log_ratio_clamp)
    tau = torch.where(advantages > 0, config.tau_positive, config.tau_negative)
    return TokenLoss(-(4.0 / tau) * torch.sigmoid(tau * (x.exp() - 1)) * advantages)


def dppo_loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: DppoConfig) -> TokenLoss:
    """Compute the policy gradient on tokens inside the trust region; see the config for the two forms.

    Source: DPPO as in verl (sides outward) and prime-rl (default_loss, ipo_loss).
    """
    x = log_ratio(log_probs, old_log_probs, config.log_ratio_clamp)
    outside = _outside_region(log_probs.detach().float(), old_log_probs.float(), advantages, config)
    if config.ratio_cap is None:
        loss = -advantages * x.exp()
    else:
        loss = -advantages * x.detach().exp().clamp(max=config.ratio_cap) * log_probs.float()
    loss = torch.where(outside, 0.0, loss)
    if config.penalty:
        loss = loss + 0.5 * config.penalty * log_ratio(log_probs, old_log_probs, None).square()
    return TokenLoss(loss, outside)


def _outside_region(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: DppoConfig) -> Tensor:
    p, p_old = log_probs.exp(), old_log_probs.exp()
    if config.divergence == "tv":
        too_high, too_low = p - p_old > config.high, p - p_old < -config.low
    else:
        not_taken = (1 - p_old) * torch.log((1 - p_old + TINY) / (1 - p + TINY))
        divergence = p_old * (old_log_probs - log_probs) + not_taken
        too_high, too_low = (divergence > config.high) & (p > p_old), (divergence > config.low) & (p < p_old)
    if config.sides == "both":
        return too_high | too_low
    return torch.where(advantages > 0, too_high, too_low)
