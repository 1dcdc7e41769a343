"""Grading one group: what a verifier sees of it, and its grades on the trajectories."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from flotilla.services.reward.verifiers.base import LONGEST_ANSWER, Verifier
from flotilla.shared.faults.armed import armed
from flotilla.shared.faults.sites import Site
from flotilla.shared.schemas.grading import MEASURED, Grade, GradingMessage, GradingSample, GradingTurn, encodable
from flotilla.shared.schemas.trajectory import FinishReason, GradeStatus, Group, Trajectory
from flotilla.shared.schemas.wire import assembled
from flotilla.shared.telemetry.tracing.recording import group_span

WEIGHT: Final = re.compile(r"reward\.components\.(\d+)\.weight")
"""The key of a component's weight."""
MOST_NAMES = 32
"""Components, and metrics, that are kept of a grade: they travel with the sample."""


async def grades_of(verifier: Verifier, group: Group) -> list[Grade]:
    """Grade what can be graded of a group; one grade for each trajectory."""
    samples = grading_samples(group)
    wanted = [index for index, trajectory in enumerate(group.trajectories) if is_gradable(trajectory)]
    grades = {n: ungraded(each) for n, each in enumerate(group.trajectories) if not is_gradable(each)}
    if wanted:
        if (faults := armed()) is not None:
            await faults.reach(Site.REWARD_SCORE)
        with group_span("reward", group.task, {"flotilla.samples": len(wanted)}):
            scored = await verifier.score([samples[index] for index in wanted])
        grades |= dict(zip(wanted, scored, strict=True))
    return [grades[index] for index in range(len(grades))]


def weights_in(settings: Mapping[str, Any]) -> dict[int, float]:
    """Find the weights of reward components that were changed for a group, by the components' numbers."""
    return {int(found[1]): float(value) for path, value in settings.items() if (found := WEIGHT.fullmatch(path))}


def grading_samples(group: Group) -> list[GradingSample]:
    """Make what a verifier sees of each trajectory."""
    task = group.task
    whole = GradingSample(
        id="",
        prompt=group.prompt,
        messages=tuple(GradingMessage(role=each.role, content=each.content) for each in task.messages),
        response="",
        label=task.label,
        data_source=task.data_source,
        metadata=dict(task.metadata),
    )
    # The task's part is checked once.
    values = dict(whole)
    return [
        assembled(GradingSample, values | _of_trajectory(f"{task.group_id}/{index}", trajectory))
        for index, trajectory in enumerate(group.trajectories)
    ]


def _of_trajectory(name: str, trajectory: Trajectory) -> dict[str, Any]:
    found: dict[str, Any] = {
        "id": name,
        "response": encodable(trajectory.text),
        "finish_reason": trajectory.finish_reason.value,
        "episode": trajectory.episode,
    }
    if trajectory.turns:
        found["turns"] = tuple(
            GradingTurn(observation=turn.observation, response=turn.text, reward=turn.reward)
            for turn in trajectory.turns
        )
    if trajectory.metrics:
        found["measured"] = MEASURED.validate_python(dict(trajectory.metrics))
    return found


def with_grades(
    group: Group, grades: Sequence[Grade], seconds: float, kept: Collection[str] = (), *, now: float | None = None
) -> Group:
    """Write each grade onto its trajectory.

    Args:
        group: as sampled.
        grades: one per trajectory.
        seconds: that grading took.
        kept: names of components and metrics that are never left out, however many a grader gives.
        now: seconds since the epoch, to record how long ago the task was issued; None to leave that as it is.

    Raises:
        ValueError: there are not as many grades as trajectories.
    """
    timings = {"grading_seconds": seconds} | ({} if now is None else group.since_issue("graded_after_seconds", now))
    graded = []
    for trajectory, grade in zip(group.trajectories, grades, strict=True):
        graded.append(
            trajectory.graded(
                grade.status,
                grade.reward,
                components=_bounded(grade.components, kept),
                reason=grade.reason,
                timings={**trajectory.timings, **timings},
                metrics={**trajectory.metrics, **_bounded(grade.metrics, kept)},
                answer=None if grade.answer is None else grade.answer[:LONGEST_ANSWER],
            )
        )
    return Group(group.task, tuple(graded), group.prompt)


def _bounded(values: Mapping[str, float], kept: Collection[str]) -> dict[str, float]:
    if len(values) <= MOST_NAMES:
        return dict(values)
    others = [name for name in values if name not in kept][:MOST_NAMES]
    return {name: values[name] for name in (*others, *kept) if name in values}


def is_gradable(trajectory: Trajectory) -> bool:
    """Whether the policy finished it: an aborted one, or one whose episode failed, is not the policy's."""
    return trajectory.finish_reason is not FinishReason.ABORTED and trajectory.status is not GradeStatus.ERROR


def ungraded(trajectory: Trajectory) -> Grade:
    """Make the grade of a trajectory that is not gradable."""
    if trajectory.status is GradeStatus.ERROR:
        return Grade.error(trajectory.reason or "the episode failed")
    return Grade.abstained("the completion was aborted")
