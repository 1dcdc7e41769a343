"""What is true after a loss: which weights training builds on, and which policy version each step makes. Pure.

SQL, the data plane, checkpoints and shared memory may each come back older than the others. Whatever came back,
training builds on the newest checkpoint that is whole, and on the plans that continue it without a gap: replayed, they
give the same weights again. A committed version that this lineage does not lead to is lost and cannot be
served, so nothing may wait for it: the trainer publishes the weights that it has under a number that was never used.

Version numbers therefore have gaps. Here alone is computed which step makes which version, and how old a token is.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from flotilla.shared.streams.intervals import IntervalSet


class Published(NamedTuple):
    """A policy version and the optimiser steps that it contains."""

    version: int
    step: int


INITIAL = Published(0, 0)
"""The weights that every engine starts with."""
ROOT = "root"
"""The lineage before the first step."""


class PlannedStep(NamedTuple):
    """A step whose groups the data plane still has.

    Attributes:
        step: its number.
        version: the policy version that it trains.
        parent, made: the lineage before and after it; see ``follow``.
    """

    step: int
    version: int
    parent: str = ""
    made: str = ""


def follow(parent: str, step: int, group_ids: Iterable[int]) -> str:
    """Name the lineage that a step makes of its parent: equal names, equal groups in equal order in every step."""
    content = f"{parent} {step} {' '.join(map(str, group_ids))}"
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class VersionLine:
    """The versions of one lineage: those that are known, then one every ``steps_per_version`` steps.

    Attributes:
        points: known versions, oldest first; at least one.
        steps_per_version: steps between two versions.
        total_steps: of the experiment; the last step always makes a version.
        lost: numbers below the newest point that no version of this lineage has.
    """

    points: tuple[Published, ...]
    steps_per_version: int
    total_steps: int
    lost: IntervalSet = field(default_factory=IntervalSet)

    @classmethod
    def of(
        cls, points: Iterable[Published], *, steps_per_version: int, total_steps: int, lost: IntervalSet | None = None
    ) -> "VersionLine":
        """Make the line through ``points``; numbers between two of them are lost, besides those that ``lost`` has."""
        known = tuple(points)
        gaps = IntervalSet() if lost is None else lost.copy()
        for before, after in pairwise(known):
            if after.version > before.version + 1:
                gaps.add_interval(before.version + 1, after.version - 1)
        return cls(known, steps_per_version, total_steps, gaps)

    def published_at(self, step: int) -> Published:
        """Find the newest version when ``step`` steps are done."""
        last = self.points[-1]
        if step < last.step:
            return max((point for point in self.points if point.step <= step), default=self.points[0])
        count, rest = divmod(step - last.step, self.steps_per_version)
        if rest and step == self.total_steps:
            return Published(last.version + count + 1, step)
        return Published(last.version + count, last.step + count * self.steps_per_version)

    def at(self, step: int) -> int:
        """Number the newest version when ``step`` steps are done: the one that the next step trains."""
        return self.published_at(step).version

    def is_published(self, step: int) -> bool:
        """Whether the weights after ``step`` steps are a version."""
        return self.published_at(step).step == step

    def is_lost(self, version: int) -> bool:
        """Whether a version was sampled from weights that are not in this lineage."""
        return version in self.lost

    def lag(self, trained: int, sampled: int) -> int:
        """Count the versions between the one that sampled a token and the one that is trained; lost ones do not count.

        A token that is newer than the weights, which a lost version sampled, has none.
        """
        skipped = sum(1 for version in self.lost if sampled < version <= trained)
        return max(0, trained - sampled - skipped)

    def oldest_allowed(self, trained: int, max_lag: int) -> int:
        """Find the oldest version whose tokens ``trained`` may still train."""
        version = trained
        for _ in range(max_lag):
            version -= 1
            while version in self.lost:
                version -= 1
        return version


@dataclass(frozen=True, slots=True)
class Standing:
    """What the trainer has when it takes over.

    Attributes:
        step: of the checkpoint that it loaded; 0 without one.
        published: the version that was newest when the checkpoint was written, as the checkpoint says.
        lineage: of the checkpoint; see ``follow``. Empty at the beginning, and where an earlier release wrote it.
        plans: uncommitted plans of the data plane, in any order.
        newest_version: highest number that the data plane knows of.
    """

    step: int
    published: Published
    plans: tuple[PlannedStep, ...] = ()
    newest_version: int = 0
    lineage: str = ""


@dataclass(frozen=True, slots=True)
class Takeover:
    """What is true after a trainer took over.

    Attributes:
        points: the versions of the lineage; the last one is, or will be, what rollouts serve.
        end_step: last step that is replayed from its plan; the checkpoint's where there is none.
        lost: highest number of a version that the lineage does not lead to; None if there is none.
    """

    points: tuple[Published, ...]
    end_step: int
    lost: int | None = None


def split_plans(standing: Standing) -> tuple[list[PlannedStep], list[PlannedStep]]:
    """Part the plans after the checkpoint into those that continue it without a gap, and the others.

    Plans of steps that the checkpoint contains are in neither: they are committed.
    """
    kept: list[PlannedStep] = []
    others: list[PlannedStep] = []
    step, version, lineage = standing.step, standing.published.version, standing.lineage
    for plan in sorted(plan for plan in standing.plans if plan.step > standing.step):
        is_next = plan.step == step + 1 and plan.version >= version
        if not others and is_next and (plan.parent == lineage or not (plan.parent and lineage)):
            kept.append(plan)
            step, version, lineage = plan.step, plan.version, plan.made
        else:
            others.append(plan)
    return kept, others


def reconcile(
    standing: Standing, committed: Published, newest_version: int, *, steps_per_version: int, total_steps: int
) -> Takeover:
    """Decide what is true after a trainer took over.

    Args:
        standing: what the trainer and the data plane have.
        committed: the current version, as the control plane has it.
        newest_version: highest number known elsewhere, such as one that was announced and aborted.
        steps_per_version, total_steps: of the experiment.
    """
    plans, _ = split_plans(standing)
    end_step = plans[-1].step if plans else standing.step
    points = [standing.published]
    for plan in plans:
        if plan.version > points[-1].version:
            # The weights before a step are the version that it trains.
            points.append(Published(plan.version, plan.step - 1))
    known = max(newest_version, standing.newest_version, committed.version)
    line = VersionLine.of(points, steps_per_version=steps_per_version, total_steps=total_steps)
    is_ours = committed.version < points[-1].version or committed in {points[-1], line.published_at(end_step)}
    # A higher number was used for weights that are not on the way to these.
    is_lost = known > line.at(end_step) or not is_ours
    if is_lost or points[-1].step < standing.step:
        # It is lost; or it is older than the checkpoint, so that its weights are not available.
        points.append(Published(max(known, line.at(end_step)) + 1, end_step))
    return Takeover(tuple(points), end_step, known if is_lost else None)
