"""On-policy distillation: a teacher's log-probs as reward per token."""

from torch import Tensor

from flotilla.services.trainer.algorithms.kl import Estimator, kl_estimate
from flotilla.services.trainer.algorithms.sequences import PackedSequences


def distil(
    advantages: Tensor,
    old_log_probs: Tensor,
    teacher_log_probs: Tensor,
    sequences: PackedSequences,
    *,
    coefficient: float,
    estimator: Estimator = "k1",
    pure: bool = False,
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

    Returns:
        [T], 0 where the mask is False.

    Source: Lu et al., On-Policy Distillation, 2025.
    """
    kl = kl_estimate(old_log_probs.detach(), teacher_log_probs, estimator=estimator)
    return (-coefficient * kl if pure else advantages - coefficient * kl) * sequences.response_mask
