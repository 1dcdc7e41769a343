"""What the teacher of on-policy distillation makes of advantages, whoever computed its log-probs."""

from dataclasses import replace

from torch import Tensor

from flotilla.services.trainer.algorithms.advantages import Advantages
from flotilla.services.trainer.algorithms.advantages.distillation import distil
from flotilla.services.trainer.algorithms.metrics import mean_over
from flotilla.services.trainer.algorithms.sequences import PackedSequences
from flotilla.shared.config.sections.distillation import DistillationConfig


def taught(
    found: Advantages, config: DistillationConfig, sampled: Tensor, teacher: Tensor, sequences: PackedSequences
) -> Advantages:
    """Add the teacher's part to advantages, or put it in their place.

    Args:
        found: of the rewards.
        config: the section.
        sampled: [T] nats of the old policy, the sampler's own by default.
        teacher: [T] nats.
        sequences: which tokens count.
    """
    advantages = distil(found.advantages, sampled, teacher, sequences, coefficient=config.coefficient, pure=config.pure)
    mask = sequences.response_mask
    metrics = found.metrics | {
        "advantage": mean_over(advantages, mask),
        "advantage_squared": mean_over(advantages.square(), mask),
        "distillation_kl": mean_over(sampled - teacher, mask),
    }
    return replace(found, advantages=advantages, metrics=metrics)
