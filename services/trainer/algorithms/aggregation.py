"""From losses per token to one number, over denominators that belong to the whole mini-batch.

The invariant: a micro-batch's loss is its share, so the shares of all micro-batches and ranks *add up* to the
mini-batch's loss, however it was cut. Where gradients are averaged over ranks, multiply by the number of ranks.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from flotilla.services.trainer.algorithms.sequences import PackedSequences
from flotilla.shared.config.sections.algorithm import AggregationConfig


@dataclass(frozen=True, eq=False)
class Denominators:
    """What a mini-batch's losses are divided by, over all its micro-batches and ranks; each a float32 scalar tensor.

    Args:
        num_tokens: sampled tokens that survived rejection, each by the share of its sequence.
        num_sequences: sequences with at least one such token, likewise.
        weight_sum: sum of importance weights, for batch normalisation.
        weight_count: what that sum is divided by.
    """

    num_tokens: Tensor
    num_sequences: Tensor
    weight_sum: Tensor
    weight_count: Tensor

    @classmethod
    def of(
        cls, num_tokens: float, num_sequences: float, weight_sum: float = 1.0, weight_count: float = 1.0
    ) -> "Denominators":
        """Build from plain numbers, on the CPU."""
        return cls(*torch.tensor([num_tokens, num_sequences, weight_sum, weight_count], dtype=torch.float32).unbind())

    @classmethod
    def total(cls, parts: Iterable["Denominators"]) -> "Denominators":
        """Add up the parts that the micro-batches contribute."""
        return cls.from_tensor(torch.stack([part.as_tensor() for part in parts]).sum(0))

    def as_tensor(self) -> Tensor:
        """Lay out as one float32 tensor [4], to be summed across ranks."""
        return torch.stack([self.num_tokens, self.num_sequences, self.weight_sum, self.weight_count])

    @classmethod
    def from_tensor(cls, values: Tensor) -> "Denominators":
        """Undo ``as_tensor``."""
        return cls(*values.unbind())


def count_sampled(sequences: PackedSequences) -> Denominators:
    """Count the sampled tokens and the sequences that have any: the part one micro-batch contributes."""
    one = torch.ones((), device=sequences.index.device)
    shares = 1.0 if sequences.shares is None else sequences.shares
    return Denominators(
        (sequences.lengths * shares).sum(),
        (sequences.is_nonempty * shares).sum().float(),
        torch.zeros_like(one),
        torch.zeros_like(one),
    )


def aggregate(
    token_loss: Tensor, sequences: PackedSequences, denominators: Denominators, config: AggregationConfig
) -> Tensor:
    """Compute this micro-batch's share of the mini-batch's loss.

    With L the token loss times its sequence's share, N_tok and N_seq the denominators and C the fixed length:

    ======================= =========================================
    token-mean              sum L / N_tok
    token-sum               sum L
    seq-mean-token-sum      sum L / N_seq
    seq-mean-token-mean     sum over sequences of (mean L) / N_seq
    seq-mean-token-sum-norm sum L / (N_seq C)
    token-sum-norm          sum L / C
    ======================= =========================================

    Args:
        token_loss: [T], differentiable; its values outside the response mask do not matter, not even if not finite.
        sequences: which tokens count, after any rejection, and their sequences.
        denominators: of the whole mini-batch; one below 1 counts as 1, so that a batch of no tokens has loss 0.
        config: mode and fixed length.

    Returns:
        Scalar with gradient.
    """
    token_loss = torch.where(sequences.response_mask, token_loss, 0.0)
    if sequences.shares is not None:
        token_loss = token_loss * sequences.spread(sequences.shares)
    num_tokens, num_sequences = denominators.num_tokens.clamp(min=1), denominators.num_sequences.clamp(min=1)
    match config.mode:
        case "token-mean":
            return token_loss.sum() / num_tokens
        case "token-sum":
            return token_loss.sum()
        case "seq-mean-token-sum":
            return token_loss.sum() / num_sequences
        case "seq-mean-token-mean":
            return sequences.mean(token_loss).sum() / num_sequences
        case "seq-mean-token-sum-norm":
            return token_loss.sum() / (num_sequences * _length(config))
        case "token-sum-norm":
            return token_loss.sum() / _length(config)


def _length(config: AggregationConfig) -> int:
    assert config.fixed_length is not None, "validated with the config"
    return config.fixed_length
