"""Losses that spare entropy: tokens whose advantage and log-probability covary strongly are dropped or held back.

Source: Cui et al., The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models, 2025.
"""

import torch
from torch import Tensor

from flotilla.services.trainer.algorithms.losses.clipped import clipped_surrogate
from flotilla.services.trainer.algorithms.losses.token_loss import TokenLoss, log_ratio
from flotilla.shared.config.sections.policy_loss import ClipCovConfig, KlCovConfig


def token_covariance(log_probs: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
    """Compute (A - mean A)(log_prob - mean log_prob) [T] without gradient, means over the sampled tokens given."""
    count = response_mask.sum().clamp(min=1)
    log_probs = log_probs.detach().float()
    mean_advantage = torch.where(response_mask, advantages, 0.0).sum() / count
    mean_log_prob = torch.where(response_mask, log_probs, 0.0).sum() / count
    return (advantages - mean_advantage) * (log_probs - mean_log_prob)


def select_by_covariance(
    config: ClipCovConfig | KlCovConfig,
    log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    candidates: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Choose the tokens that the loss treats differently.

    kl_cov takes the ``fraction`` of highest covariance, clip_cov draws as many from its band; at least one.

    Args:
        config: fraction and band.
        log_probs: [T] nats, over all tokens of the mini-batch with the config's ``old``.
        advantages: [T].
        response_mask: [T] bool; means and the fraction are over these tokens.
        candidates: [T] bool, those of them that may be chosen; absent, all.
        generator: draws for clip_cov; None for torch's global one.

    Returns:
        [T] bool.
    """
    covariance = token_covariance(log_probs, advantages, response_mask)
    quota = (config.fraction * response_mask.sum().double()).floor().clamp(min=1)
    allowed = response_mask if candidates is None else response_mask & candidates
    if isinstance(config, KlCovConfig):
        return allowed & _first(torch.where(allowed, -covariance, torch.inf), quota)
    allowed = allowed & (covariance > config.lower) & (covariance < config.upper)
    order = torch.rand(covariance.shape, generator=generator, device=covariance.device)
    return allowed & _first(torch.where(allowed, order, torch.inf), quota)


def clip_cov_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: ClipCovConfig,
    selected: Tensor | None,
    generator: torch.Generator | None = None,
) -> TokenLoss:
    """Compute PPO's loss [T] without the selected tokens; those that the clip already stops are not selected."""
    ratio = log_ratio(log_probs, old_log_probs, config.log_ratio_clamp).exp()
    base = clipped_surrogate(ratio, advantages, clip_low=config.clip_low, clip_high=config.clip_high, dual_clip=None)
    assert base.clipped is not None
    free = response_mask & ~base.clipped
    if config.covariance_of == "current":
        selected = select_by_covariance(
            config, log_probs, advantages, response_mask, candidates=free, generator=generator
        )
    dropped = _given(selected) & free
    return TokenLoss(torch.where(dropped, 0.0, base.values), dropped)


def kl_cov_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: KlCovConfig,
    selected: Tensor | None,
) -> TokenLoss:
    """Compute -A r [T], plus coefficient |x| on the selected tokens."""
    x = log_ratio(log_probs, old_log_probs, config.log_ratio_clamp)
    if config.covariance_of == "current":
        selected = select_by_covariance(config, log_probs, advantages, response_mask)
    penalised = _given(selected) & response_mask
    plain = -advantages * x.exp()
    return TokenLoss(torch.where(penalised, plain + config.coefficient * x.abs(), plain), penalised)


def _given(selected: Tensor | None) -> Tensor:
    if selected is None:
        raise ValueError(
            "covariance_of old selects over the whole mini-batch: pass what select_by_covariance chose as selected"
        )
    return selected


def _first(keys: Tensor, quota: Tensor) -> Tensor:
    """Mark the ``quota`` smallest of [T] keys, without reading anything back from the device."""
    rank = torch.empty_like(keys, dtype=torch.long)
    rank[keys.argsort()] = torch.arange(keys.numel(), device=keys.device)
    return rank < quota
