"""Recorded groups graded again: by a verifier of today, from what an earlier one was given.

What an earlier grader left on a sample is taken off first, so that the new one sees what the first one saw.
"""

import time
from collections.abc import Collection
from dataclasses import dataclass, replace

from flotilla.services.reward.decision import Decision, decide, used_names, why_failed
from flotilla.services.reward.grading import grades_of, with_grades
from flotilla.services.reward.verifiers.base import Verifier
from flotilla.shared.config.sections.reward import RewardConfig
from flotilla.shared.schemas.sample_kinds import KeptGroup, SampleKind
from flotilla.shared.schemas.trajectory import GradeStatus, Group, Trajectory

UNSHAPED = "unshaped"
"""The component that holds the graders' verdict where a reward was shaped."""


@dataclass(frozen=True, eq=False)
class Regraded:
    """A group under the new grader.

    Attributes:
        graded: with the new grades, before anything is shaped or masked.
        decision: what would have become of it; None in evaluation, where nothing is decided.
    """

    graded: Group
    decision: Decision | None


def names_of(config: RewardConfig) -> frozenset[str]:
    """Name the components of a reward section."""
    return frozenset(each.name or each.kind for each in config.components)


def lost_mask(group: Group, config: RewardConfig) -> bool:
    """Whether the record lacks which tokens of a member were sampled: ``sample_mask`` had left it out of the loss."""
    return config.sample_mask is not None and any(
        each.status is GradeStatus.SCORED and not each.num_sampled for each in group.trajectories
    )


def graded_reward(trajectory: Trajectory) -> float | None:
    """Return the graders' verdict, before it was shaped; None without one."""
    return trajectory.components.get(UNSHAPED, trajectory.reward)


def as_sampled(group: Group, graders: Collection[str]) -> Group:
    """Take the grades off a recorded group.

    A member without a grade because its episode failed stays so: its reason names no grader.

    Args:
        group: as recorded.
        graders: names of the components that graded it.
    """
    return replace(group, trajectories=tuple(_as_sampled(each, graders) for each in group.trajectories))


def _as_sampled(trajectory: Trajectory, graders: Collection[str]) -> Trajectory:
    reason = trajectory.reason or ""
    if trajectory.status is GradeStatus.ERROR and not any(reason.startswith(f"{name}: ") for name in graders):
        return trajectory
    measured = {name: value for name, value in trajectory.metrics.items() if name.partition("/")[0] not in graders}
    timings = {name: value for name, value in trajectory.timings.items() if name != "grading_seconds"}
    return replace(
        trajectory,
        status=GradeStatus.PENDING,
        reward=None,
        components={},
        reason=None,
        answer=None,
        metrics=measured,
        timings=timings,
    )


async def regrade(kept: KeptGroup, verifier: Verifier, config: RewardConfig, graders: Collection[str]) -> Regraded:
    """Grade a recorded group as the reward service would have.

    Args:
        kept: from the record.
        verifier, config: of the new grader.
        graders: names of the components that graded it.
    """
    sampled = as_sampled(kept.group, graders)
    started = time.perf_counter()
    grades = await grades_of(verifier, sampled)
    graded = with_grades(sampled, grades, time.perf_counter() - started, used_names(config))
    if kept.kind is SampleKind.EVALUATION:
        return Regraded(graded, None)
    return Regraded(graded, decide(graded, config, why_failed(sampled)))
