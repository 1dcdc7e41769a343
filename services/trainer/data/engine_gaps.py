"""How far log-probabilities of each rollout's engine are from the trainer's, on tokens of the trained version."""

from collections.abc import Iterable, Sequence

import numpy as np

from flotilla.shared.schemas.sample_kinds import TrainedTokens
from flotilla.shared.schemas.trajectory import Group

PREFIX = "engine_gap/"
MOST_ROLLOUTS = 64
"""Of one step; the others have no series."""


def engine_gaps(traced: Iterable[tuple[Group, Sequence[TrainedTokens | None]]]) -> dict[str, float]:
    """Measure the mean distance in nats per token, by the service that sampled.

    Only tokens of lag 0 count: the trainer computed them with the weights that sampled them, as long as the step made
    one update and began with a published version.

    Args:
        traced: groups with what was found about each trajectory; None for one that was not trained.

    Returns:
        ``engine_gap/ROLLOUT``, for rollouts that sampled such tokens.
    """
    sums: dict[str, tuple[float, int]] = {}
    for group, tokens in traced:
        for trajectory, found in zip(group.trajectories, tokens, strict=True):
            if found is None or trajectory.rollout is None:
                continue
            is_of_now = np.zeros(trajectory.token_ids.shape, dtype=bool)
            ends = [start for start, _ in found.lags[1:]] + [trajectory.token_ids.size]
            for (start, lag), end in zip(found.lags, ends, strict=True):
                is_of_now[start:end] = lag == 0
            apart = np.abs(found.log_probs.astype(np.float64) - trajectory.log_probs)
            apart = apart[is_of_now & trajectory.loss_mask.astype(bool) & np.isfinite(found.log_probs)]
            total, count = sums.get(trajectory.rollout, (0.0, 0))
            sums[trajectory.rollout] = total + float(apart.sum()), count + apart.size
    counted = [(name, total / count) for name, (total, count) in sorted(sums.items()) if count]
    return {f"{PREFIX}{name}": mean for name, mean in counted[:MOST_ROLLOUTS]}
