"""What is measured of the groups of a step, and the figures that grow over a whole experiment.

verl's names where they exist; lags are exact, per token. Cumulative figures travel with the checkpoint.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from flotilla.services.trainer.data.batch import scored_trajectories
from flotilla.shared.schemas.service import ON_DEMAND
from flotilla.shared.schemas.trajectory import Group, Trajectory
from flotilla.shared.telemetry.reward_metrics import Scored


@dataclass
class Totals:
    """Figures that grow over the whole experiment; they are part of a checkpoint.

    Attributes:
        trained_tokens: sampled tokens that were trained.
        generated_tokens: sampled tokens of all groups that arrived, trained or not.
        trained_groups, trained_trajectories: what was trained.
        stale_groups, stale_trajectories: of them, those with a token that an older version sampled.
        filtered_groups, dropped_groups, failed_groups: what the trainer resolved otherwise.
    """

    trained_tokens: int = 0
    generated_tokens: int = 0
    trained_groups: int = 0
    trained_trajectories: int = 0
    stale_groups: int = 0
    stale_trajectories: int = 0
    filtered_groups: int = 0
    dropped_groups: int = 0
    failed_groups: int = 0

    def to_dict(self) -> dict[str, int]:
        """Make a mapping of it."""
        return asdict(self)


def describe_groups(
    groups: Sequence[Group], version: int, totals: Totals, lag: Callable[[int, int], int]
) -> dict[str, float]:
    """Measure what is about to be trained, and add it to the totals.

    Args:
        groups: of one step.
        version: that is being trained.
        totals: changed.
        lag: counts the versions from the one that sampled a token to the one that is trained, given the trained one.

    Returns:
        Rewards, lengths, lags and verl's counts of stale and partial trajectories. ``stale`` means that some sampled
        token of the group or trajectory has a lag of 1 or more (verl uses only the version at the end);
        ``partial`` that its tokens have several versions, ``span`` how far those are apart. ``resumed`` tokens came
        from a rollout that left and handed them over.
    """
    members = [[(t, t.sampled_runs()) for t in scored_trajectories(group)] for group in groups]
    flat = [pair for group in members for pair in group]
    rewards = np.array([t.reward for t, _ in flat], dtype=np.float64)
    lengths = np.array([sum(count for _, count in runs) for _, runs in flat])
    ages = [(lag(version, each), count) for _, runs in flat for each, count in runs]
    lags = np.repeat(*np.array(ages, np.int64).reshape(-1, 2).T)
    versions = [[each for each, _ in runs] for _, runs in flat]
    spans = np.array([max(each, default=0) - min(each, default=0) for each in versions])
    totals.trained_tokens += int(lengths.sum())
    totals.trained_groups += len(groups)
    totals.trained_trajectories += len(flat)
    totals.stale_trajectories += sum(min(each, default=version) < version for each in versions)
    totals.stale_groups += sum(any(each < version for _, runs in group for each, _ in runs) for group in members)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        "completion_tokens/mean": float(lengths.mean()),
        "completion_tokens/max": float(lengths.max()),
        "prompt_tokens/mean": float(np.mean([t.token_ids.size for t, _ in flat]) - lengths.mean()),
        "lag/mean": float(lags.mean()) if lags.size else 0.0,
        "lag/max": float(lags.max()) if lags.size else 0.0,
        **_lag_histogram(lags),
        **_record_size([t for t, _ in flat]),
        "tokens/trained_in_step": float(lengths.sum()),
        "tokens/resumed_in_step": float(sum(t.resumed_tokens for t, _ in flat)),
        **_tokens_by_pool([t for t, _ in flat]),
        "tokens/trained": float(totals.trained_tokens),
        "tokens/generated": float(totals.generated_tokens),
        "groups/in_step": float(len(groups)),
        "groups/trained": float(totals.trained_groups),
        "groups/filtered": float(totals.filtered_groups),
        "groups/dropped": float(totals.dropped_groups),
        "groups/failed": float(totals.failed_groups),
        "samples/in_step": float(len(flat)),
        "samples/without_reward": float(sum(len(group.trajectories) for group in groups) - len(flat)),
        "fully_async/count/stale_samples_processed": float(totals.stale_groups),
        "fully_async/count/stale_trajectory_processed": float(totals.stale_trajectories),
        "fully_async/partial/total_partial_num": float((spans > 0).sum()),
        "fully_async/partial/partial_ratio": float((spans > 0).mean()),
        "fully_async/partial/max_partial_span": float(spans.max()),
    }


def describe_finished(groups: Sequence[Group], totals: Totals) -> dict[str, float]:
    """Measure groups that no policy sampled and that are about to be trained, and add them to the totals."""
    members = [t for group in groups for t in scored_trajectories(group)]
    lengths = np.array([t.num_sampled for t in members])
    totals.trained_tokens += int(lengths.sum())
    totals.trained_groups += len(groups)
    totals.trained_trajectories += len(members)
    return {
        "completion_tokens/mean": float(lengths.mean()),
        "completion_tokens/max": float(lengths.max()),
        "prompt_tokens/mean": float(np.mean([t.token_ids.size for t in members]) - lengths.mean()),
        "tokens/trained_in_step": float(lengths.sum()),
        "tokens/trained": float(totals.trained_tokens),
        "groups/in_step": float(len(groups)),
        "groups/trained": float(totals.trained_groups),
        "groups/filtered": float(totals.filtered_groups),
        "groups/failed": float(totals.failed_groups),
        "samples/in_step": float(len(members)),
    }


def _tokens_by_pool(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Count what rollouts of each pool sampled themselves; nothing where none names a pool."""
    if all(each.pool is None for each in trajectories):
        return {}
    counts: Counter[str] = Counter()
    for each in trajectories:
        counts[f"tokens/trained_in_step/{each.pool or ON_DEMAND}"] += each.num_sampled - each.resumed_tokens
    return {name: float(count) for name, count in counts.items()}


def with_sources(groups: Sequence[Group]) -> list[Scored]:
    """List the trajectories that are trained, each with the data source of its task."""
    return [(group.task.data_source, t) for group in groups for t in scored_trajectories(group)]


def _lag_histogram(lags: np.ndarray[tuple[int], np.dtype[np.int64]]) -> dict[str, float]:
    """Count the trained tokens of each lag, as ``lag/tokens/LAG``; lags that no token has are left out."""
    return {f"lag/tokens/{lag}": float(count) for lag, count in enumerate(np.bincount(lags)) if count}


def _record_size(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Measure what the experts that engines recorded take of streams and memory; nothing where there are none."""
    records = [len(each.experts.data) for each in trajectories if each.experts is not None]
    num_tokens = sum(each.token_ids.size for each in trajectories if each.experts is not None)
    return {"router/record_bytes_per_token": sum(records) / num_tokens} if records else {}
