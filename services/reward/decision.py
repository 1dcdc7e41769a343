"""What becomes of a graded group: trained as shaped and masked, filtered since it teaches nothing, or failed.

One decision for the service that grades during a run and for a later regrading of its samples.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from pydantic import TypeAdapter

from flotilla.services.reward.filtering import keeps, masked_group
from flotilla.services.reward.grading import is_gradable
from flotilla.services.reward.shaping import shaped_group
from flotilla.shared.config.load.live import FILTERS, with_values
from flotilla.shared.config.sections.reward import RewardConfig
from flotilla.shared.config.sections.shaping import GroupFilterConfig, SpreadAboveConfig
from flotilla.shared.errors import EpisodeFailed
from flotilla.shared.schemas.trajectory import GradeStatus, Group
from flotilla.shared.streams.hop import Resolution

GRADING_ERROR = "grading_error"
ALL_ABSTAINED = "all_abstained"
ALL_MASKED = "all_masked"

GROUP_FILTER: Final[TypeAdapter[GroupFilterConfig | None]] = TypeAdapter(GroupFilterConfig | None)


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a group.

    Attributes:
        trained: as the trainer gets it; None if it is not trained.
        resolution, reason: how and why it ends here; None where it is trained.
    """

    trained: Group | None
    resolution: Resolution | None = None
    reason: str | None = None

    @property
    def is_filtered_by_rule(self) -> bool:
        """Whether a rule of the spec found that it teaches nothing."""
        return self.resolution is Resolution.FILTERED and self.reason not in {ALL_ABSTAINED, ALL_MASKED}


def decide(graded: Group, config: RewardConfig, failure: str = GRADING_ERROR) -> Decision:
    """Decide about a group of the training lane.

    Args:
        graded: with its grades as the graders gave them.
        config: filters, masks and shaping.
        failure: the reason if no sample could be graded.
    """
    statuses = {trajectory.status for trajectory in graded.trajectories}
    if GradeStatus.SCORED not in statuses:
        if GradeStatus.ERROR in statuses:
            return Decision(None, Resolution.FAILED, failure)
        return Decision(None, Resolution.FILTERED, ALL_ABSTAINED)
    reason = why_filtered(graded, config)
    if reason is not None:
        return Decision(None, Resolution.FILTERED, reason)
    trained = for_training(graded, config)
    if not any(each.num_sampled for each in trained.trajectories):
        return Decision(None, Resolution.FILTERED, ALL_MASKED)
    return Decision(trained)


def why_failed(sampled: Group) -> str:
    """Return the reason for which a group fails none of whose samples has a grade: what came first."""
    is_left = any(is_gradable(trajectory) for trajectory in sampled.trajectories)
    return GRADING_ERROR if is_left else EpisodeFailed.code


def with_rules(config: RewardConfig, settings: Mapping[str, Any]) -> RewardConfig:
    """Put in place the filter rules that a group carries, since they were changed before it was issued.

    A section stands before its keys in the order of paths, and keys that it replaced are not carried.
    """
    rules = sorted((path, value) for path, value in settings.items() if path.startswith(FILTERS))
    if not rules:
        return config
    present = config.model_dump(mode="json", include={"filter_zero_spread", "group_filter"})
    changed = with_values({"reward": present}, rules)["reward"]
    return config.model_copy(
        update={
            "filter_zero_spread": changed["filter_zero_spread"],
            "group_filter": GROUP_FILTER.validate_python(changed["group_filter"]),
        }
    )


def used_names(config: RewardConfig) -> frozenset[str]:
    """Name the components and metrics that something is decided by: an advantage, or a filter of groups."""
    names = {component.name or component.kind for component in config.components}
    metric = None if config.group_filter is None else config.group_filter.metric
    return frozenset(names if metric is None else {*names, metric})


def why_filtered(group: Group, config: RewardConfig) -> str | None:
    """Return why a graded group is not worth training on, if so.

    A greedy answer that the others are compared with counts where a spread is asked for: answers that are equal teach,
    if it is not. It is excluded from the mean, which estimates the task's difficulty for the policy as it samples.
    """
    metric = None if config.group_filter is None else config.group_filter.metric
    members, greedy = (
        [
            t.metrics.get(metric or "", t.reward)
            for t in group.trajectories
            if t.reward is not None and t.is_baseline is it
        ]
        for it in (False, True)
    )
    rewards = group.episode_rewards() if metric is None else members
    compared = [*rewards, *greedy]
    if config.filter_zero_spread and len(compared) > 1 and max(compared) == min(compared):
        return "zero_spread"
    by_spread = isinstance(config.group_filter, SpreadAboveConfig)
    if config.group_filter is not None and not keeps(compared if by_spread else rewards, config.group_filter):
        return config.group_filter.kind
    return None


def for_training(group: Group, config: RewardConfig) -> Group:
    """Mask and shape what the trainer gets; both use the rewards as graded."""
    graded = group
    if config.shaping is not None:
        group = shaped_group(group, config.shaping)
    if config.sample_mask is None:
        return group
    masked = masked_group(graded, config.sample_mask).trajectories
    pairs = zip(group.trajectories, masked, strict=True)
    return replace(
        group, trajectories=tuple(replace(t, loss_mask=m.loss_mask, log_probs=m.log_probs) for t, m in pairs)
    )
