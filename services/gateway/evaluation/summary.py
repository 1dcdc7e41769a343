"""What an evaluation found, as numbers: a pure function of graded groups."""

from collections.abc import Sequence
from statistics import fmean

from services.gateway.datasets.dataset import Part
from shared.schemas.trajectory import GradeStatus, Group

PREFIX = "evaluation/"


def summarise_sets(groups: Sequence[Group], parts: Sequence[Part], *, num_issued: int) -> dict[str, float]:
    """Compute the metrics of an evaluation: of all problems, and of each named set under ``evaluation/NAME/``.

    Args:
        groups: graded answers of the problems that came back.
        parts: which rows are of which set.
        num_issued: problems that were asked, all rows of all sets.
    """
    metrics = summarise(groups, num_lost=num_issued - len(groups))
    for part in parts:
        if part.name is not None:
            own = [group for group in groups if part.start <= group.task.row < part.start + part.num_rows]
            found = summarise(own, num_lost=part.num_rows - len(own))
            metrics |= {f"{PREFIX}{part.name}/{name.removeprefix(PREFIX)}": value for name, value in found.items()}
    return metrics


def summarise(groups: Sequence[Group], *, num_lost: int) -> dict[str, float]:
    """Compute the metrics of an evaluation.

    ``accuracy`` is the mean over problems of the mean reward of their scored answers, ``reward_mean`` the mean over all
    scored answers; both are left out when nothing was scored, since there is no such number then.

    Args:
        groups: graded answers of the problems that came back.
        num_lost: problems whose group failed or was dropped on its way.
    """
    rewards = [group.rewards() for group in groups]
    scored = [reward for each in rewards for reward in each]
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    errors = sum(trajectory.status is GradeStatus.ERROR for trajectory in trajectories)
    metrics = {"evaluation/num_scored": float(len(scored)), "evaluation/num_errors": float(errors + num_lost)}
    if scored:
        metrics["evaluation/accuracy"] = fmean(fmean(each) for each in rewards if each)
        metrics["evaluation/reward_mean"] = fmean(scored)
    if trajectories:
        metrics["evaluation/mean_completion_tokens"] = fmean(t.num_sampled for t in trajectories)
    return metrics
