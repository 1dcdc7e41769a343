"""Rewards relative to the mean and deviation of a batch, of a group, or of all that came before."""

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flotilla.shared.config.sections.shaping import NormalisationConfig
from flotilla.shared.statistics.moments import RunningMoments

Rewards = NDArray[np.float64]


class StatisticsConfig(NormalisationConfig):
    """Statistics over more than a group, for a whole batch: the reward service sees one group at a time."""

    mean: Literal["batch", "group", "running"] | None = "group"  # type: ignore[assignment]
    std: Literal["batch", "group", "running"] | None = None  # type: ignore[assignment]


def normalise(
    rewards: ArrayLike, group_index: ArrayLike, config: NormalisationConfig, running: RunningMoments | None = None
) -> Rewards:
    """Subtract the mean and divide by the deviation, each over what the config says.

    Args:
        rewards: [S].
        group_index: [S] int, the group of each reward: by task, or by anything else.
        config: which statistics.
        running: moments that already contain these rewards; needed for ``running`` statistics.

    Returns:
        [S] float64.

    Raises:
        ValueError: running statistics are asked for and not given, or shapes differ.
    """
    values, groups = np.asarray(rewards, dtype=np.float64), np.asarray(group_index)
    if values.shape != groups.shape or values.ndim != 1:
        raise ValueError(f"want [S] rewards and [S] groups, got {values.shape} and {groups.shape}")
    if values.size == 0:
        return values
    if "running" in (config.mean, config.std) and running is None:
        raise ValueError("running statistics need the moments so far")
    _, index = np.unique(groups, return_inverse=True)
    centred = values - _mean(values, index, config.mean, running)
    if config.std is not None:
        sizes, std = _std(centred if config.std_of == "centred" else values, index, config.std, running)
        if config.degenerate == "zero":
            usable = (sizes > 1) & (std > config.epsilon)
            centred = np.where(usable, centred / (std + config.epsilon), 0.0)
        else:
            centred = centred / (std + config.epsilon)
    return centred if config.clip is None else centred.clip(*config.clip)


def group_mean(values: Rewards, index: NDArray[np.intp]) -> tuple[Rewards, Rewards]:
    """Give each reward the size of its group and the group's mean; of equal rewards exactly that reward.

    Args:
        values: [S].
        index: [S] number of each reward's group.
    """
    sizes = np.bincount(index).astype(np.float64)
    least, largest = np.full(sizes.shape, np.inf), np.full(sizes.shape, -np.inf)
    np.minimum.at(least, index, values)
    np.maximum.at(largest, index, values)
    # Rounding may carry the mean out of these bounds, and a deviation that should be 0 divides the remainder.
    mean = np.clip(np.bincount(index, weights=values) / sizes, least, largest)
    return sizes[index], mean[index]


def _mean(values: Rewards, index: NDArray[np.intp], over: str | None, running: RunningMoments | None) -> Rewards:
    match over:
        case "batch":
            return np.full_like(values, values.mean().clip(values.min(), values.max()))
        case "group":
            return group_mean(values, index)[1]
        case "running":
            assert running is not None
            return np.full_like(values, running.mean)
        case _:
            return np.zeros_like(values)


def _std(
    values: Rewards, index: NDArray[np.intp], over: str, running: RunningMoments | None
) -> tuple[Rewards, Rewards]:
    """Return for each reward the size of the set of its deviation, and that deviation."""
    if over == "running":
        assert running is not None
        return np.full_like(values, running.count), np.full_like(values, running.std)
    if over == "batch":
        index = np.zeros_like(index)
    sizes, mean = group_mean(values, index)
    squares = np.bincount(index, weights=(values - mean) ** 2)[index]
    return sizes, np.sqrt(squares / np.maximum(sizes - 1, 1))
