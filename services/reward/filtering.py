"""Which groups are worth training on, and which of their trajectories enter the loss."""

from collections.abc import Sequence
from dataclasses import replace
from typing import assert_never

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flotilla.services.reward.normalisation import group_mean
from flotilla.shared.config.sections.shaping import (
    GroupFilterConfig,
    MeanInRangeConfig,
    SampleMaskConfig,
    SpreadAboveConfig,
)
from flotilla.shared.schemas.trajectory import GradeStatus, Group


def keeps(rewards: Sequence[float], config: GroupFilterConfig) -> bool:
    """Return whether a group with these rewards is trained on.

    Rewards are compared as float32, the precision they travel in, and averaged in float64.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.size == 1 and config.keep_single:
        return True
    match config:
        case MeanInRangeConfig():
            mean = values.astype(np.float32).astype(np.float64).mean()
            above = config.low is None or mean > config.low
            return bool(above and (config.high is None or mean < config.high))
        case SpreadAboveConfig():
            return _spread(values, config.statistic) > config.threshold
        case _:
            assert_never(config)


def sample_mask(
    rewards: ArrayLike, lengths: ArrayLike, group_index: ArrayLike, config: SampleMaskConfig
) -> NDArray[np.bool_]:
    """Return which trajectories enter the loss.

    Args:
        rewards: [S].
        lengths: [S] sampled tokens.
        group_index: [S] int.
        config: the rules, combined by AND.

    Returns:
        [S] bool.
    """
    values, sizes = np.asarray(rewards, dtype=np.float64), np.asarray(lengths)
    kept = np.ones(values.shape, dtype=np.bool_)
    if config.max_length is not None:
        kept &= sizes < config.max_length
    if config.difficulty is not None:
        low, high = config.difficulty
        _, index = np.unique(np.asarray(group_index), return_inverse=True)
        _, mean = group_mean(values, index)
        kept &= (mean > low) & (mean < high)
    if config.wrong_up_to_length is not None:
        kept &= (values == 1) | ((values == 0) & (sizes < config.wrong_up_to_length))
    return kept


def masked_group(group: Group, config: SampleMaskConfig) -> Group:
    """Empty the loss mask of the trajectories that are left out; they keep their rewards and their place."""
    scored = [index for index, t in enumerate(group.trajectories) if t.status is GradeStatus.SCORED]
    rewards = [group.trajectories[index].reward or 0.0 for index in scored]
    lengths = [group.trajectories[index].num_sampled for index in scored]
    kept = sample_mask(rewards, lengths, np.zeros(len(scored), dtype=np.int64), config)
    trajectories = list(group.trajectories)
    for index, stays in zip(scored, kept.tolist(), strict=True):
        if not stays:
            left = trajectories[index]
            trajectories[index] = replace(
                left, loss_mask=np.zeros_like(left.loss_mask), log_probs=np.zeros_like(left.log_probs)
            )
    return replace(group, trajectories=tuple(trajectories))


def _spread(values: NDArray[np.float64], statistic: str) -> float:
    if statistic == "range":
        return float(values.max() - values.min())
    if statistic == "population_std":
        return float(values.std())
    return float(values.std(ddof=1)) if values.size > 1 else 0.0
