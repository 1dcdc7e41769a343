"""From a config to its loss."""

from typing import assert_never

import torch
from torch import Tensor

from flotilla.services.trainer.algorithms.losses import clipped, covariance, weighted
from flotilla.services.trainer.algorithms.losses.token_loss import TokenLoss
from flotilla.services.trainer.algorithms.sequences import PackedSequences
from flotilla.shared.config.sections import policy_loss as configs
from flotilla.shared.config.sections.policy_loss import PolicyLossConfig


def policy_loss(
    config: PolicyLossConfig,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    sequences: PackedSequences,
    *,
    scores: Tensor | None = None,
    selected: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> TokenLoss:
    """Compute the configured loss per token, before importance weights and aggregation.

    Args:
        config: which loss, with its options.
        log_probs: [T] nats, with gradient.
        old_log_probs: [T] nats, the ratio's denominator.
        advantages: [T].
        sequences: which tokens count, and their sequences.
        scores: [S] rewards, needed by topr.
        selected: [T] bool from ``select_by_covariance``, needed by clip_cov and kl_cov with ``covariance_of: old``.
        generator: draws the tokens that clip_cov drops; None for torch's global one.

    Raises:
        ValueError: topr without scores, clip_cov or kl_cov without ``selected``.
    """
    match config:
        case configs.PpoConfig():
            return clipped.ppo_loss(log_probs, old_log_probs, advantages, config)
        case configs.GspoConfig():
            return clipped.gspo_loss(log_probs, old_log_probs, advantages, sequences, config)
        case configs.GmpoConfig():
            return clipped.gmpo_loss(log_probs, old_log_probs, advantages, sequences, config)
        case configs.ClipCovConfig():
            return covariance.clip_cov_loss(
                log_probs, old_log_probs, advantages, sequences.response_mask, config, selected, generator
            )
        case configs.KlCovConfig():
            return covariance.kl_cov_loss(
                log_probs, old_log_probs, advantages, sequences.response_mask, config, selected
            )
        case configs.CispoConfig():
            return weighted.cispo_loss(log_probs, old_log_probs, advantages, config)
        case configs.ToprConfig():
            if scores is None:
                raise ValueError("topr tells positive sequences from others by their scores: pass scores [S]")
            return weighted.topr_loss(log_probs, old_log_probs, advantages, sequences, scores, config)
        case configs.DroConfig():
            return weighted.dro_loss(log_probs, old_log_probs, advantages, config)
        case configs.SapoConfig():
            return weighted.sapo_loss(log_probs, old_log_probs, advantages, sequences, config)
        case configs.DppoConfig():
            return weighted.dppo_loss(log_probs, old_log_probs, advantages, config)
        case configs.PolicyGradientConfig():
            return weighted.policy_gradient_loss(log_probs, advantages)
        case _:
            assert_never(config)
