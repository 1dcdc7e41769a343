"""Packed sequences: which token belongs to which, and sums, means and scans that never cross a boundary."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PackedSequences:
    """S sequences laid end to end in T tokens.

    Args:
        index: [T] int64 in [0, count), not decreasing within a sequence's span: tokens of one sequence are contiguous.
        response_mask: [T] bool, True where the policy sampled the token.
        count: S, sequences without any token included.
        shares: [S] float32, weight of each in a loss, such as 1/3 where three are one episode; None: 1 each.
    """

    index: Tensor
    response_mask: Tensor
    count: int
    shares: Tensor | None = None

    def __post_init__(self) -> None:
        if self.index.shape != self.response_mask.shape or self.index.dim() != 1:
            raise ValueError(f"want [T] and [T], got {tuple(self.index.shape)} and {tuple(self.response_mask.shape)}")

    @classmethod
    def of(
        cls, index: Tensor, response_mask: Tensor, count: int | None = None, shares: Tensor | None = None
    ) -> "PackedSequences":
        """Build from [T] int64 and [T] bool; without ``count`` the largest index is read back (one device sync)."""
        if count is None:
            count = int(index.max()) + 1 if index.numel() else 0
        return cls(index.long(), response_mask.bool(), count, shares)

    def with_mask(self, response_mask: Tensor) -> "PackedSequences":
        """Make the same sequences with another mask [T]."""
        return PackedSequences(self.index, response_mask, self.count, self.shares)

    def sum(self, values: Tensor) -> Tensor:
        """Sum [T] over each sequence's sampled tokens: [S]."""
        return scatter_sum(torch.where(self.response_mask, values, 0.0), self.index, self.count)

    def mean(self, values: Tensor) -> Tensor:
        """Average [T] over each sequence's sampled tokens: [S], 0 for a sequence without any."""
        return self.sum(values) / self.lengths.clamp(min=1)

    def spread(self, per_sequence: Tensor) -> Tensor:
        """Give every token [T] its sequence's value [S]."""
        return per_sequence[self.index]

    @cached_property
    def lengths(self) -> Tensor:
        """[S] float32, sampled tokens of each sequence."""
        return scatter_sum(self.response_mask.float(), self.index, self.count)

    @cached_property
    def is_nonempty(self) -> Tensor:
        """[S] bool, whether the sequence has a sampled token."""
        return self.lengths > 0

    @cached_property
    def is_last_of_sequence(self) -> Tensor:
        """[T] bool, whether the next token belongs to another sequence."""
        ends = torch.ones_like(self.response_mask)
        ends[:-1] = self.index[1:] != self.index[:-1]
        return ends

    @cached_property
    def segment_index(self) -> Tensor:
        """[T] int64, a number per contiguous run of sampled tokens within a sequence; meaningless where masked."""
        starts = self.response_mask.clone()
        starts[1:] &= ~(self.response_mask[:-1] & (self.index[1:] == self.index[:-1]))
        return (starts.cumsum(0) - 1).clamp(min=0)

    @cached_property
    def segments(self) -> "PackedSequences":
        """The contiguous runs of sampled tokens as sequences of their own: T of them at most, the rest empty."""
        return PackedSequences(self.segment_index, self.response_mask, self.index.numel())

    @cached_property
    def is_last_sampled(self) -> Tensor:
        """[T] bool, whether the token is the last sampled one of its sequence."""
        sampled = self.response_mask.long()
        position = sampled.cumsum(0)
        before = torch.zeros(self.count, dtype=torch.long, device=self.index.device)
        last = before.scatter_reduce(0, self.index, torch.where(self.response_mask, position, 0), "amax")
        return self.response_mask & (position == last[self.index])


def scatter_sum(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Sum [T] values into [count] bins by index [T]; differentiable."""
    return torch.zeros(count, dtype=values.dtype, device=values.device).index_add(0, index, values)


def suffix_recurrence(decay: Tensor, increment: Tensor) -> Tensor:
    """Solve y_t = increment_t + decay_t y_{t+1} with y_T = 0, for [T] tensors.

    Recursive doubling: log2(T) vector operations, no loop over tokens. A decay of 0 at a sequence's last token keeps
    sequences apart; 1 with increment 0 carries the value over a token unchanged.

    Source: Kogge and Stone, A Parallel Algorithm for the Efficient Solution of Recurrence Equations, 1973.
    """
    step, total = 1, increment.numel()
    decay, increment = decay.clone(), increment.clone()
    while step < total:
        increment[:-step] = increment[:-step] + decay[:-step] * increment[step:]
        decay[:-step] = decay[:-step] * decay[step:]
        step *= 2
    return increment


def suffix_sum(values: Tensor, sequences: PackedSequences) -> Tensor:
    """Sum [T] from each token to its sequence's end."""
    return suffix_recurrence((~sequences.is_last_of_sequence).to(values.dtype), values)
