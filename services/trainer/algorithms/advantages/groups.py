"""Advantages of whole sequences, from comparison with the other members of their group."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from flotilla.services.trainer.algorithms.sequences import scatter_sum

GroupOfOne = Literal["zero", "raw"]


@dataclass(frozen=True, eq=False)
class Groups:
    """Which of S sequences are compared with each other.

    Args:
        index: [S] int64 in [0, count).
        count: number of groups.
    """

    index: Tensor
    count: int

    @classmethod
    def of(cls, group_index: Tensor) -> "Groups":
        """Build from arbitrary group ids [S]; members need not be neighbours."""
        ids, index = torch.unique(group_index, return_inverse=True)
        return cls(index, ids.numel())

    @cached_property
    def sizes(self) -> Tensor:
        """[S] float32, members of each sequence's group."""
        return self.sum(torch.ones(self.index.shape, device=self.index.device))

    def sum(self, values: Tensor) -> Tensor:
        """Sum [S] over each group, given back to each member: [S]."""
        return scatter_sum(values.float(), self.index, self.count)[self.index]

    def mean(self, values: Tensor) -> Tensor:
        """Average [S] over each group, given back to each member: [S]; of equal values exactly that value."""
        return self.within(self.sum(values) / self.sizes, values)

    def within(self, means: Tensor, values: Tensor) -> Tensor:
        """Bound means [S] by the least and the largest of each group's values [S].

        Rounding carries the mean of eight times 0.7 off 0.7, and an estimator that divides by a deviation makes
        advantages of that.
        """
        return torch.minimum(torch.maximum(means, self.min(values)), self.max(values))

    @cached_property
    def first(self) -> Tensor:
        """[count] int64, a member of each group."""
        places = torch.arange(len(self.index), device=self.index.device)
        return torch.zeros_like(places[: self.count]).scatter_(0, self.index, places)

    def std(self, values: Tensor) -> Tensor:
        """Unbiased standard deviation of each group, given back to each member: [S]; 0 for a group of one."""
        squares = self.sum((values.float() - self.mean(values)).square())
        return (squares / (self.sizes - 1).clamp(min=1)).sqrt()

    def max(self, values: Tensor) -> Tensor:
        """Largest value of each group, given back to each member: [S]."""
        lowest = torch.full((self.count,), -torch.inf, device=values.device)
        return lowest.scatter_reduce(0, self.index, values.float(), "amax")[self.index]

    def min(self, values: Tensor) -> Tensor:
        """Least value of each group, given back to each member: [S]."""
        return -self.max(-values)


def _alone(groups: Groups, advantages: Tensor, scores: Tensor, rule: GroupOfOne) -> Tensor:
    return torch.where(groups.sizes > 1, advantages, scores.float() if rule == "raw" else 0.0)


def centred(scores: Tensor, groups: Groups, *, group_of_one: GroupOfOne = "zero") -> Tensor:
    """Subtract the group's mean: [S] (Dr. GRPO, REINFORCE++-baseline)."""
    return _alone(groups, scores.float() - groups.mean(scores), scores, group_of_one)


def grpo(scores: Tensor, groups: Groups, *, epsilon: float, group_of_one: GroupOfOne = "zero") -> Tensor:
    """Subtract the group's mean and divide by its unbiased standard deviation plus epsilon: [S].

    A group of one keeps its score over 1 + epsilon under ``raw``, else gets 0. Equal scores give 0.

    Source: Shao et al., DeepSeekMath, 2024, section 4.1.
    """
    advantages = (scores.float() - groups.mean(scores)) / (groups.std(scores) + epsilon)
    return _alone(groups, advantages, scores / (1 + epsilon), group_of_one)


def grpo_passk(scores: Tensor, groups: Groups, *, normalise_by_std: bool, epsilon: float) -> Tensor:
    """Give the best of each group its lead over the second best, all others 0: [S].

    Raises:
        ValueError: a group has fewer than two members.

    Source: Walder and Karkhanis, Pass@K Policy Optimization, 2025.
    """
    if bool((groups.sizes < 2).any()):
        raise ValueError("pass@k compares the best of a group with the second best: every group needs two members")
    scores = scores.float()
    best = groups.max(scores)
    is_best = scores == best
    is_tied = groups.sum(is_best.float()) > 1
    second = groups.max(torch.where(is_best, -torch.inf, scores))
    lead = torch.where(is_best & ~is_tied, best - second, 0.0)
    return lead / (groups.std(scores) + epsilon) if normalise_by_std else lead


def rloo(scores: Tensor, groups: Groups, *, group_of_one: GroupOfOne = "zero") -> Tensor:
    """Subtract the mean of the group's other members: [S].

    Source: Ahmadian et al., Back to Basics, 2024, eq. 8.
    """
    scores = scores.float()
    others = groups.within((groups.sum(scores) - scores) / (groups.sizes - 1).clamp(min=1), scores)
    return _alone(groups, scores - others, scores, group_of_one)


def opo(scores: Tensor, lengths: Tensor, groups: Groups, *, group_of_one: GroupOfOne = "zero") -> Tensor:
    """Subtract the group's mean weighted by response lengths [S]: [S].

    Source: Hao et al., On-Policy RL with Optimal Reward Baseline, 2025.
    """
    baseline = groups.within(groups.sum(lengths * scores) / groups.sum(lengths).clamp(min=1), scores)
    return _alone(groups, scores.float() - baseline, scores, group_of_one)


def gpg(
    scores: Tensor,
    groups: Groups,
    *,
    divisor: float = 1.0,
    scale_over: Literal["differing_groups", "nonzero_rewards"] = "differing_groups",
    group_of_one: GroupOfOne = "zero",
) -> Tensor:
    """Subtract the group's mean and scale by sequences over sequences that teach: [S].

    Args:
        scores: [S].
        groups: the sequences compared with each other.
        divisor: of every advantage.
        scale_over: ``differing_groups``: a sequence teaches where a member of its group has an advantage, which is
            ``B / (B - M)`` of the paper; ``nonzero_rewards``: where its score is not 0, as verl counts.
        group_of_one: see ``grpo``.

    Source: Chu et al., GPG, 2025, eq. 6 and 7.
    """
    advantages = centred(scores, groups, group_of_one=group_of_one)
    teaching = groups.max(advantages.abs()) if scale_over == "differing_groups" else scores
    return scores.numel() / teaching.count_nonzero().clamp(min=1) * advantages / divisor


def gdpo(
    component_scores: Tensor,
    groups: Groups,
    *,
    weights: Tensor | None = None,
    epsilon: float,
    group_of_one: GroupOfOne = "zero",
) -> Tensor:
    """Normalise each reward component in its group, then add them up with weights: [S], before whitening.

    Args:
        component_scores: [S, K].
        groups: the sequences compared with each other.
        weights: [K]; absent, 1 each.
        epsilon: added to each standard deviation.
        group_of_one: see ``grpo``.

    Source: Liu et al., Group reward-Decoupled Normalization Policy Optimization, 2026.
    """
    normalised = torch.stack(
        [grpo(scores, groups, epsilon=epsilon, group_of_one=group_of_one) for scores in component_scores.unbind(1)], 1
    )
    return normalised.sum(1) if weights is None else (normalised * weights).sum(1)
