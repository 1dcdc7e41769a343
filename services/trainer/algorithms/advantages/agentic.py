"""Advantages of an environment's steps: GiGPO and step REINFORCE. Here every sequence is one step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flotilla.services.trainer.algorithms.advantages.groups import Groups
from flotilla.services.trainer.algorithms.sequences import PackedSequences, suffix_recurrence


@dataclass(frozen=True, eq=False)
class EnvironmentSteps:
    """S steps of several trajectories through an environment.

    Args:
        step_scores: [S] reward of each step.
        trajectory_index: [S] int64, which trajectory a step belongs to.
        step_index: [S] int64, its place in that trajectory.
        state_index: [S] int64, a number (or hash) of the state that the step started from.
        episode_scores: [S] score of the step's whole episode; needed by GiGPO.
    """

    step_scores: Tensor
    trajectory_index: Tensor
    step_index: Tensor
    state_index: Tensor
    episode_scores: Tensor | None = None


def step_returns(steps: EnvironmentSteps, *, gamma: float) -> Tensor:
    """Discount each trajectory's later step scores: [S], whatever order the steps come in."""
    by_step = steps.step_index.argsort(stable=True)
    order = by_step[steps.trajectory_index[by_step].argsort(stable=True)]
    trajectory = steps.trajectory_index[order]
    layout = PackedSequences(trajectory, torch.ones_like(trajectory, dtype=torch.bool), 0)
    returns = torch.empty_like(steps.step_scores, dtype=torch.float32)
    decay = gamma * (~layout.is_last_of_sequence).float()
    returns[order] = suffix_recurrence(decay, steps.step_scores.float()[order])
    return returns


def normalised_in_group(scores: Tensor, groups: Groups, *, divide_by_std: bool, epsilon: float) -> Tensor:
    """Centre scores [S] in their group; divide by its deviation plus epsilon, or give 0 where that is below epsilon."""
    centred = scores.float() - groups.mean(scores)
    if not divide_by_std:
        return centred
    std = groups.std(scores)
    return torch.where((groups.sizes > 1) & (std > epsilon), centred / (std + epsilon), 0.0)


def same_state(group_index: Tensor, state_index: Tensor) -> Groups:
    """Group the steps that start from the same state *within* a trajectory group; ids may repeat between groups."""
    _, index = torch.unique(torch.stack([group_index.long(), state_index.long()], 1), dim=0, return_inverse=True)
    return Groups.of(index)


def step_reinforce(
    steps: EnvironmentSteps, group_index: Tensor, *, gamma: float, divide_by_std: bool = True, epsilon: float = 1e-6
) -> Tensor:
    """Normalise discounted step returns among all steps of their trajectory group: [S].

    Args:
        steps: the steps.
        group_index: [S] which trajectory group (same task, same start) a step belongs to.
        gamma: discount per step.
        divide_by_std: whether to divide by the deviation.
        epsilon: added to it.
    """
    groups = Groups.of(group_index)
    return normalised_in_group(step_returns(steps, gamma=gamma), groups, divide_by_std=divide_by_std, epsilon=epsilon)


def gigpo(
    steps: EnvironmentSteps,
    group_index: Tensor,
    *,
    gamma: float,
    episode_weight: float = 1.0,
    step_weight: float = 1.0,
    divide_by_std: bool = True,
    epsilon: float = 1e-6,
) -> Tensor:
    """Add the episode's advantage in its group and the step's advantage among steps from the same state: [S].

    Raises:
        ValueError: ``steps`` has no episode scores.

    Source: Feng et al., Group-in-Group Policy Optimization, 2025.
    """
    if steps.episode_scores is None:
        raise ValueError("gigpo needs the episode score of every step")
    episode = normalised_in_group(
        steps.episode_scores, Groups.of(group_index), divide_by_std=divide_by_std, epsilon=epsilon
    )
    states = same_state(group_index, steps.state_index)
    step = normalised_in_group(step_returns(steps, gamma=gamma), states, divide_by_std=divide_by_std, epsilon=epsilon)
    return episode_weight * episode + step_weight * step
