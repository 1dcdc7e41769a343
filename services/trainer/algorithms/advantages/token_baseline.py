"""The baseline that minimises the gradient's variance, for every position of a group's answers."""

from typing import Literal

import torch
from torch import Tensor

from flotilla.services.trainer.algorithms.advantages.groups import Groups
from flotilla.services.trainer.algorithms.sequences import PackedSequences, scatter_sum, suffix_recurrence, suffix_sum


def score_energy(old_log_probs: Tensor, sum_pi_squared: Tensor, importance_weights: Tensor | None = None) -> Tensor:
    """Compute the squared norm of the logits' gradient per token: ``1 - 2 pi + sum pi^2``, pi of the taken token.

    Args:
        old_log_probs: [T] nats.
        sum_pi_squared: [T], sum over the vocabulary of p^2.
        importance_weights: [T], whose squares multiply it; 0 for tokens that do not enter the gradient.

    Returns:
        [T].
    """
    energy = 1 - 2 * old_log_probs.float().exp() + sum_pi_squared
    return energy if importance_weights is None else energy * importance_weights.square()


def optimal_token_baseline(
    token_rewards: Tensor,
    energy: Tensor,
    sequences: PackedSequences,
    groups: Groups,
    *,
    positions: Literal["all", "sampled"] = "all",
    drop_tail: bool = True,
    epsilon: float = 1e-8,
) -> tuple[Tensor, Tensor]:
    """Subtract from reward-to-go the group's mean at the same position, weighted by accumulated score-function energy.

    With W the running sum of ``score_energy``, per position ``b = sum_i G_i W_i / sum_i W_i``; where
    all members have the same G, it is exactly that. Where no member has weight yet, as before the first token that a
    correction keeps, it is 0, as in verl.

    Args:
        token_rewards: [T].
        energy: [T], see ``score_energy``.
        sequences: layout.
        groups: of the sequences.
        positions: count every token of the layout, which a batch begins at the first sampled one, or sampled ones only.
        drop_tail: no baseline where the longest member is alone, beyond the second-longest one's length. Lengths count
            sampled tokens, so with several turns ``sampled`` positions are what they agree with.
        epsilon: keeps the weighted mean finite.

    Returns:
        [T] advantages and [T] reward-to-go, 0 where the mask is False. A group of one has no baseline.
    """
    mask = sequences.response_mask
    returns = suffix_sum(torch.where(mask, token_rewards.float(), 0.0), sequences)
    weight = _running_sum(torch.where(mask, energy, 0.0), sequences)
    position = _positions(sequences, positions)
    # Of sampled positions, those before the first are masked; they share bin 0 with weight 0.
    width = int(position.max()) + 1 if position.numel() else 1
    bins = groups.index[sequences.index] * width + position
    weight = torch.where(mask, weight, 0.0)
    num_bins = groups.count * width
    baseline = scatter_sum(returns * weight, bins, num_bins) / (scatter_sum(weight, bins, num_bins) + epsilon)
    highest, lowest = (sign * _largest(sign * returns, mask, bins, num_bins) for sign in (1, -1))
    baseline = torch.where(highest == lowest, highest, baseline)[bins]
    if drop_tail:
        baseline = torch.where(_is_alone(position, sequences, groups), 0.0, baseline)
    baseline = torch.where(sequences.spread(groups.sizes) > 1, baseline, 0.0)
    return (returns - baseline) * mask, returns * mask


def _largest(values: Tensor, mask: Tensor, index: Tensor, count: int) -> Tensor:
    """Find the largest of the values [T] where the mask holds, in each bin: [count]."""
    lowest = torch.full((count,), -torch.inf, device=values.device)
    return lowest.scatter_reduce(0, index, torch.where(mask, values, -torch.inf), "amax")


def _running_sum(values: Tensor, sequences: PackedSequences) -> Tensor:
    starts = torch.ones_like(sequences.response_mask)
    starts[1:] = sequences.index[1:] != sequences.index[:-1]
    return suffix_recurrence((~starts).float().flip(0), values.flip(0)).flip(0)


def _positions(sequences: PackedSequences, which: Literal["all", "sampled"]) -> Tensor:
    mask = sequences.response_mask
    counted = _running_sum((mask if which == "sampled" else torch.ones_like(mask)).float(), sequences)
    return (counted.long() - 1).clamp(min=0)


def _is_alone(position: Tensor, sequences: PackedSequences, groups: Groups) -> Tensor:
    """Mark the tokens [T] of a group's only longest member that lie beyond the second-longest one's length."""
    lengths = sequences.lengths
    is_longest = lengths == groups.max(lengths)
    is_only = is_longest & (groups.sum(is_longest.float()) == 1)
    second = groups.max(torch.where(is_longest, -torch.inf, lengths))
    return sequences.spread(is_only) & (position >= sequences.spread(second))
