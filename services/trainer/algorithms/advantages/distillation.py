"""On-policy distillation: a teacher's log-probs as reward per token."""

from dataclasses import replace

from torch import Tensor

from flotilla.services.trainer.algorithms.advantages.compute import Advantages
from flotilla.services.trainer.algorithms.kl import Estimator, kl_estimate
from flotilla.services.trainer.algorithms.metrics import mean_over
from flotilla.services.trainer.algorithms.sequences import PackedSequences
from flotilla.shared.config.sections.distillation import DistillationConfig


def distil(
    advantages: Tensor,
    old_log_probs: Tensor,
    teacher_log_probs: Tensor,
    sequences: PackedSequences,
    *,
    coefficient: float,
    estimator: Estimator = "k1",
    pure: bool = False,
    value_clamp: float | None = 10.0,
) -> Tensor:
    """Subtract coefficient KL(student || teacher) per token from the advantages, without accumulating it over time.

    Args:
        advantages: [T].
        old_log_probs: [T] nats of the student.
        teacher_log_probs: [T] nats.
        sequences: which tokens count.
        coefficient: weight of the teacher.
        estimator: of the KL.
        pure: drop the advantages and keep the teacher's part only.
        value_clamp: bound on a token's KL, either way; None for none.

    Returns:
        [T], 0 where the mask is False.

    Source: Lu et al., On-Policy Distillation, 2025.
    """
    kl = kl_estimate(old_log_probs.detach(), teacher_log_probs, estimator=estimator, value_clamp=value_clamp)
    return (-coefficient * kl if pure else advantages - coefficient * kl) * sequences.response_mask


def distilled(
    found: Advantages,
    config: DistillationConfig,
    old_log_probs: Tensor,
    teacher_log_probs: Tensor,
    sequences: PackedSequences,
) -> Advantages:
    """Add the teacher's part to advantages, or put it in their place, and report the KL to it.

    Args:
        found: of the rewards.
        config: the section.
        old_log_probs: [T] nats of the student, the sampler's own by default.
        teacher_log_probs: [T] nats.
        sequences: which tokens count.
    """
    advantages = distil(
        found.advantages,
        old_log_probs,
        teacher_log_probs,
        sequences,
        coefficient=config.coefficient,
        pure=config.pure,
        value_clamp=config.value_clamp,
    )
    mask = sequences.response_mask
    metrics = found.metrics | {
        "advantage": mean_over(advantages, mask),
        "advantage_squared": mean_over(advantages.square(), mask),
        "distillation_kl": mean_over(old_log_probs - teacher_log_probs, mask),
    }
    return replace(found, advantages=advantages, metrics=metrics)
