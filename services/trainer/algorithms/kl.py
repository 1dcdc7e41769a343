"""Divergence from a reference policy: estimators per token, exact values, and the coefficient's controller."""

from typing import Literal

import torch
from torch import Tensor

from flotilla.services.trainer.algorithms.metrics import Tally
from flotilla.services.trainer.algorithms.sequences import PackedSequences
from flotilla.shared.config.sections.algorithm import KlLossConfig, KlRewardConfig

Estimator = Literal["k1", "abs", "k2", "k3"]
MAX_GRADIENT_WEIGHT = 10.0


def kl_estimate(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    *,
    estimator: Estimator,
    log_ratio_bounds: tuple[float | None, float | None] = (-20.0, 20.0),
    value_clamp: float | None = 10.0,
) -> Tensor:
    """Estimate KL(policy || reference) from the sampled token alone.

    With d = log_probs - ref_log_probs: k1 = d, abs = |d|, k2 = d^2/2, k3 = exp(-d) - 1 + d.

    Args:
        log_probs: [T] nats; the gradient flows through them.
        ref_log_probs: [T] nats.
        estimator: which value.
        log_ratio_bounds: bounds on d inside k3, None for none.
        value_clamp: bound on the value's magnitude, None for none; where it acts the gradient is 0.

    Returns:
        [T] nats.

    Source: Schulman, Approximating KL Divergence, 2020.
    """
    difference = log_probs.float() - ref_log_probs.float()
    match estimator:
        case "k1":
            value = difference
        case "abs":
            value = difference.abs()
        case "k2":
            value = 0.5 * difference.square()
        case "k3":
            lower, upper = log_ratio_bounds
            if lower is not None or upper is not None:
                difference = difference.clamp(min=lower, max=upper)
            value = torch.exp(-difference) - 1 + difference
    return value if value_clamp is None else value.clamp(-value_clamp, value_clamp)


def kl_loss(
    log_probs: Tensor, ref_log_probs: Tensor, config: KlLossConfig, old_log_probs: Tensor | None = None
) -> Tensor:
    """Estimate the KL with the gradient that the config asks for.

    Args:
        log_probs: [T] nats, with gradient.
        ref_log_probs: [T] nats.
        config: estimator and gradient.
        old_log_probs: [T] nats of the behaviour policy, for ``weighted_k2``; absent, the
            current one.

    Returns:
        [T] nats, before the coefficient.
    """
    value = kl_estimate(
        log_probs,
        ref_log_probs,
        estimator=config.estimator,
        log_ratio_bounds=config.log_ratio_bounds,
        value_clamp=config.value_clamp,
    )
    if config.gradient == "estimator":
        return value
    surrogate = 0.5 * (log_probs.float() - ref_log_probs.float()).square()
    if config.gradient == "weighted_k2" and old_log_probs is not None:
        surrogate = surrogate * (log_probs.float() - old_log_probs.float()).detach().exp().clamp(
            max=MAX_GRADIENT_WEIGHT
        )
    return surrogate - surrogate.detach() + value.detach()


def exact_kl(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Compute KL(policy || reference) over the vocabulary: sum_v p (log p - log q).

    Args:
        log_probs: [..., V] normalised log-probabilities, with gradient.
        ref_log_probs: [..., V] of the reference.

    Returns:
        [...] nats.
    """
    probabilities = log_probs.exp()
    return torch.where(probabilities > 0, probabilities * (log_probs - ref_log_probs), 0.0).sum(-1)


def subtract_kl_from_rewards(
    token_rewards: Tensor, kl: Tensor, sequences: PackedSequences, coefficient: float
) -> tuple[Tensor, Tensor]:
    """Charge each sampled token for its divergence, and measure that divergence.

    Args:
        token_rewards: [T].
        kl: [T] nats, without gradient.
        sequences: which tokens count.
        coefficient: reward per nat.

    Returns:
        [T] rewards, unchanged where the mask is False; scalar mean over all sequences of their mean KL, sequences
        without a sampled token counting as 0 (what the adaptive controller of verl and ROLL observes).
    """
    charged = torch.where(sequences.response_mask, token_rewards - coefficient * kl, token_rewards)
    return charged, sequences.mean(kl).sum() / max(sequences.count, 1)


def updated_coefficient(
    coefficient: float, config: KlLossConfig | KlRewardConfig, *, observed_kl: float, num_sequences: int
) -> float:
    """Move the coefficient toward the target; a fixed one stays as it is.

    ``coefficient * (1 + clip(observed / target - 1, -0.2, 0.2) * num_sequences / horizon)``, once per step.

    Source: Ziegler et al., Fine-Tuning Language Models from Human Preferences, 2019, section 2.2.
    """
    if config.target is None:
        return coefficient
    error = min(max(observed_kl / config.target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * num_sequences / config.horizon)


def adapted_coefficient(
    coefficient: float | None,
    config: KlLossConfig | KlRewardConfig | None,
    *,
    of_reward: Tensor | None,
    of_loss: Tally | None,
    num_sequences: int,
) -> float | None:
    """Move the coefficient by the KL that a step observed where the config has it; without one it stays.

    Args:
        coefficient: the present value; None without a KL.
        config: the section.
        of_reward: scalar nats, observed with the advantages.
        of_loss: nats, over the tokens of the loss.
        num_sequences: of the step.
    """
    if isinstance(config, KlRewardConfig):
        observed = None if of_reward is None else float(of_reward)
    else:
        observed = None if of_loss is None else of_loss.value
    if config is None or coefficient is None or observed is None:
        return coefficient
    return updated_coefficient(coefficient, config, observed_kl=observed, num_sequences=num_sequences)
