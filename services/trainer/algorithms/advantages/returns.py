"""Advantages and returns from rewards per token: GAE, reward-to-go, reward-to-go per turn."""

from typing import Literal

import torch
from torch import Tensor

from flotilla.services.trainer.algorithms.sequences import PackedSequences, suffix_recurrence, suffix_sum

MaskedTokens = Literal["skip", "step"]


def rewards_at_last_token(
    scores: Tensor, sequences: PackedSequences, *, clip: tuple[float, float] | None = None
) -> Tensor:
    """Put each sequence's score [S], clipped, on its last sampled token: [T]. One without sampled tokens loses it."""
    scores = scores.float() if clip is None else scores.float().clamp(*clip)
    return torch.where(sequences.is_last_sampled, sequences.spread(scores), 0.0)


def gae(
    token_rewards: Tensor,
    values: Tensor,
    sequences: PackedSequences,
    *,
    gamma: float,
    lam: float,
    masked_tokens: MaskedTokens = "skip",
) -> tuple[Tensor, Tensor]:
    """Estimate advantages from values.

    ``delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lam A_{t+1}; return_t = A_t + V_t``, with V and A 0
    beyond a sequence's end.

    Args:
        token_rewards: [T].
        values: [T] of the critic.
        sequences: layout.
        gamma: discount per step.
        lam: bias against variance.
        masked_tokens: ``skip``: t+1 is the next sampled token; ``step``: masked ones are steps of value and reward 0.

    Returns:
        [T] advantages and [T] returns, both 0 where the mask is False.

    Source: Schulman et al., High-Dimensional Continuous Control Using GAE, 2016, eq. 16.
    """
    if masked_tokens == "skip":
        mask, packed = sequences.response_mask, _sampled_only(sequences)
        advantages, returns = gae(token_rewards[mask], values[mask], packed, gamma=gamma, lam=lam, masked_tokens="step")
        return _unpacked(advantages, mask), _unpacked(returns, mask)
    rewards = torch.where(sequences.response_mask, token_rewards.float(), 0.0)
    values = torch.where(sequences.response_mask, values.float(), 0.0)
    continues = (~sequences.is_last_of_sequence).float()
    following = torch.cat([values[1:], values.new_zeros(min(1, values.numel()))]) * continues
    advantages = suffix_recurrence(gamma * lam * continues, rewards + gamma * following - values)
    return advantages * sequences.response_mask, (advantages + values) * sequences.response_mask


def discounted_returns(
    token_rewards: Tensor, sequences: PackedSequences, *, gamma: float, masked_tokens: MaskedTokens = "skip"
) -> Tensor:
    """Sum each token's later rewards, its own included: G_t = r_t + gamma G_{t+1}; [T], 0 where the mask is False.

    Args:
        token_rewards: [T]; rewards on masked tokens are ignored.
        sequences: layout.
        gamma: discount per step.
        masked_tokens: whether a masked token costs a discount step.
    """
    if masked_tokens == "skip":
        mask = sequences.response_mask
        packed = discounted_returns(token_rewards[mask], _sampled_only(sequences), gamma=gamma, masked_tokens="step")
        return _unpacked(packed, mask)
    rewards = torch.where(sequences.response_mask, token_rewards.float(), 0.0)
    returns = suffix_recurrence(gamma * (~sequences.is_last_of_sequence).float(), rewards)
    return returns * sequences.response_mask


def turn_returns(token_rewards: Tensor, sequences: PackedSequences, *, gamma: float) -> Tensor:
    """Discount per turn: G_k = r(last token of turn k) + gamma G_{k+1}, the same for all tokens of turn k; [T].

    A turn is a contiguous run of sampled tokens; rewards on its other tokens are not read.
    """
    ends = sequences.segments.is_last_sampled
    turns = PackedSequences(sequences.index[ends], sequences.response_mask[ends], sequences.count)
    per_turn = discounted_returns(token_rewards[ends], turns, gamma=gamma, masked_tokens="step")
    by_segment = torch.zeros(sequences.index.numel(), device=per_turn.device)
    by_segment[sequences.segment_index[ends]] = per_turn
    return by_segment[sequences.segment_index] * sequences.response_mask


def remax(token_rewards: Tensor, baselines: Tensor, sequences: PackedSequences) -> tuple[Tensor, Tensor]:
    """Compute reward-to-go less the reward of the greedy answer.

    Args:
        token_rewards: [T].
        baselines: [S] rewards of greedy answers to the same prompts.
        sequences: layout.

    Returns:
        [T] advantages and [T] reward-to-go, both 0 where the mask is False.

    Source: Li et al., ReMax, 2024.
    """
    mask = sequences.response_mask
    to_go = suffix_sum(torch.where(mask, token_rewards.float(), 0.0), sequences)
    return (to_go - sequences.spread(baselines.float())) * mask, to_go * mask


def _sampled_only(sequences: PackedSequences) -> PackedSequences:
    mask = sequences.response_mask
    return PackedSequences(sequences.index[mask], mask[mask], sequences.count)


def _unpacked(values: Tensor, mask: Tensor) -> Tensor:
    full = torch.zeros(mask.shape, dtype=values.dtype, device=values.device)
    full[mask] = values
    return full
