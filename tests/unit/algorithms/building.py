"""Small packed batches for the algorithm tests."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flotilla.services.trainer.algorithms.advantages.groups import Groups
from flotilla.services.trainer.algorithms.sequences import PackedSequences


@dataclass(frozen=True, eq=False)
class Batch:
    """Random tokens of several sequences, packed."""

    sequences: PackedSequences
    log_probs: Tensor
    old_log_probs: Tensor
    rollout_log_probs: Tensor
    ref_log_probs: Tensor
    advantages: Tensor
    entropy: Tensor
    scores: Tensor
    group_index: Tensor

    @property
    def groups(self) -> Groups:
        return Groups.of(self.group_index)

    def tokens(self, chosen: Tensor) -> dict[str, Any]:
        """Take the tokens [T] bool of whole sequences, renumbered, as arguments of ``policy_objective``."""
        kept = torch.unique(self.sequences.index[chosen])
        numbering = torch.zeros(self.sequences.count, dtype=torch.long)
        numbering[kept] = torch.arange(len(kept))
        return {
            "log_probs": self.log_probs[chosen],
            "old_log_probs": self.old_log_probs[chosen],
            "rollout_log_probs": self.rollout_log_probs[chosen],
            "ref_log_probs": self.ref_log_probs[chosen],
            "advantages": self.advantages[chosen],
            "entropy": self.entropy[chosen],
            "sequences": PackedSequences(
                numbering[self.sequences.index[chosen]], self.sequences.response_mask[chosen], len(kept)
            ),
            "scores": self.scores[kept],
        }


def a_batch(
    lengths: list[int], *, seed: int = 0, mask_holes: bool = False, group_size: int = 2, spread: float = 0.3
) -> Batch:
    """Build sequences of these lengths, each starting with a prompt token that was not sampled."""
    random = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = torch.ones(total, dtype=torch.bool)
    mask[1:] = index[1:] == index[:-1]
    mask[:1] = False
    if mask_holes:
        mask &= torch.rand(total, generator=random) > 0.3
    old = -torch.rand(total, generator=random) * 2 - 0.01

    def near(values: Tensor) -> Tensor:
        return (values + spread * torch.randn(total, generator=random)).clamp(max=-1e-3)

    return Batch(
        sequences=PackedSequences(index, mask, len(lengths)),
        log_probs=near(old),
        old_log_probs=old,
        rollout_log_probs=near(old),
        ref_log_probs=near(old),
        advantages=torch.randn(total, generator=random),
        entropy=torch.rand(total, generator=random),
        scores=torch.randn(len(lengths), generator=random),
        group_index=torch.arange(len(lengths)) // group_size,
    )
