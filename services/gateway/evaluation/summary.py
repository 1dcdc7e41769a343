"""What an evaluation found, as numbers: a pure function of graded groups.

What several answers to one problem are worth: pure functions of their rewards.

All are exact: over the draws of k of the n answers *without* replacement they take the expectation, by counting. verl
draws 1,000 times with replacement instead, so its ``best@n`` is below the best of the n.

Sources: Chen et al., Evaluating Large Language Models Trained on Code, 2021, eq. 1 (pass@k); Wang et al.,
Self-Consistency, 2022 (majority).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from flotilla.services.gateway.datasets.dataset import Part
from flotilla.shared.schemas.trajectory import GradeStatus, Group, Trajectory
from flotilla.shared.telemetry.reward_metrics import SeriesNames, describe_rewards

PREFIX = "evaluation/"
RIGHT_OR_WRONG = (0.0, 1.0)


def sizes_up_to(num_answers: int) -> list[int]:
    """List the powers of two up to a number, and the number itself: the k that are recorded."""
    powers = [1 << exponent for exponent in range(num_answers.bit_length())]
    return powers if powers[-1] == num_answers else [*powers, num_answers]


def pass_at(num_right: int, num_answers: int, k: int) -> float:
    """Compute the chance that a right answer is among k of them.

    Raises:
        ValueError: k is not between 1 and the number of answers.
    """
    if not 1 <= k <= num_answers:
        raise ValueError(f"k must be between 1 and {num_answers}, got {k}")
    return 1 - math.comb(num_answers - num_right, k) / math.comb(num_answers, k)


def best_at(rewards: Sequence[float], k: int) -> float:
    """Compute the expected largest reward of k of them; the largest of all for k = n, their mean for k = 1.

    Raises:
        ValueError: k is not between 1 and the number of rewards.
    """
    num = len(rewards)
    if not 1 <= k <= num:
        raise ValueError(f"k must be between 1 and {num}, got {k}")
    # The i-th smallest (from 0) is the largest of those draws that take the others from the i below it.
    weighted = (reward * math.comb(rank, k - 1) for rank, reward in enumerate(sorted(rewards)))
    return math.fsum(weighted) / math.comb(num, k)


def majority(rewards: Sequence[float], answers: Sequence[str | None]) -> float:
    """Take the reward of the answer that most samples gave.

    No answer is an answer like others, of ties the one that came first wins, and an answer that was graded more than
    once has its first grade (as in verl).

    Raises:
        ValueError: there are no rewards, or not one answer for each.
    """
    if not rewards or len(rewards) != len(answers):
        raise ValueError(f"{len(answers)} answers do not go with {len(rewards)} rewards")
    votes: dict[str | None, int] = {}
    for answer in answers:
        votes[answer] = votes.get(answer, 0) + 1
    winner = max(votes, key=votes.__getitem__)
    return rewards[answers.index(winner)]


def summarise_sets(
    groups: Sequence[Group], parts: Sequence[Part], *, num_issued: int, num_answers: int, pass_reward: float
) -> dict[str, float]:
    """Compute the metrics of an evaluation: of all problems, of each named set under ``evaluation/NAME/``, and of each
    data source under ``evaluation/source/SOURCE/``.

    Args:
        groups: graded answers of the problems that came back.
        parts: which rows are of which set.
        num_issued: problems that were asked, all rows of all sets.
        num_answers: to each problem.
        pass_reward: an answer with at least this reward passes.
    """

    def measure(some: Sequence[Group], num_lost: int) -> dict[str, float]:
        return summarise(some, num_lost=num_lost) | compare_answers(
            some, num_answers=num_answers, pass_reward=pass_reward
        )

    names = SeriesNames()
    groups = [_joined(group) for group in groups]
    metrics = measure(groups, num_issued - len(groups)) | _graders(groups, names)
    for part in parts:
        if part.name is not None:
            own = [group for group in groups if part.start <= group.task.row < part.start + part.num_rows]
            metrics |= _under(part.name, measure(own, part.num_rows - len(own)))
    by_source: dict[str, list[Group]] = {}
    for group in groups:
        name = None if group.task.data_source is None else names.source(group.task.data_source)
        if name is not None:
            by_source.setdefault(name, []).append(group)
    for name, own in by_source.items():
        metrics |= _under(f"source/{name}", measure(own, 0))
    return metrics


def _joined(group: Group) -> Group:
    """Make one answer of the branches of an episode: the last of them, with their mean reward."""
    found: dict[object, list[Trajectory]] = {}
    for number, each in enumerate(group.trajectories):
        found.setdefault(number if each.episode is None else each.episode, []).append(each)
    if len(found) == len(group.trajectories):
        return group
    answers = []
    for branches in found.values():
        scored = [each for each in branches if each.reward is not None]
        rewards = [each.reward for each in scored if each.reward is not None]
        answers.append(scored[-1].graded(GradeStatus.SCORED, fmean(rewards)) if scored else branches[-1])
    return replace(group, trajectories=tuple(answers))


def summarise(groups: Sequence[Group], *, num_lost: int) -> dict[str, float]:
    """Compute the metrics of an evaluation.

    ``accuracy`` is the mean over problems of the mean reward of their scored answers, where each is 0 or 1; elsewhere
    ``mean@N`` has that number. Of how many rows they are is in ``num_graded_rows``, of ``num_rows`` that were asked.
    ``reward_mean`` is the mean over all scored answers. Both are left out when nothing was
    scored, since there is no such number then.

    Args:
        groups: graded answers of the problems that came back.
        num_lost: problems whose group failed or was dropped on its way.
    """
    rewards = [group.rewards() for group in groups]
    scored = [reward for each in rewards for reward in each]
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    errors = sum(trajectory.status is GradeStatus.ERROR for trajectory in trajectories)
    metrics = {
        "evaluation/num_rows": float(len(groups) + num_lost),
        "evaluation/num_graded_rows": float(sum(map(bool, rewards))),
        "evaluation/num_scored": float(len(scored)),
        "evaluation/num_errors": float(errors + num_lost),
    }
    if scored:
        if all(reward in RIGHT_OR_WRONG for reward in scored):
            metrics["evaluation/accuracy"] = fmean(fmean(each) for each in rewards if each)
        metrics["evaluation/reward_mean"] = fmean(scored)
    if trajectories:
        metrics["evaluation/mean_completion_tokens"] = fmean(t.num_sampled for t in trajectories)
    return metrics


def compare_answers(groups: Sequence[Group], *, num_answers: int, pass_reward: float) -> dict[str, float]:
    """Compute what several answers to a problem are worth: ``pass@K``, ``best@K``, ``mean@N`` and ``maj@N``.

    N is ``num_answers``, K the powers of two up to it and N. Each is the mean over the problems that have K scored
    answers (any, for ``mean@N`` and ``maj@N``); ``maj@N`` exists where a grader says what it took for the answer.
    """
    problems = [[t for t in group.trajectories if t.reward is not None] for group in groups]
    problems = [answers for answers in problems if answers]
    rewards = [[t.reward for t in answers if t.reward is not None] for answers in problems]
    metrics: dict[str, float] = {}
    for k in sizes_up_to(num_answers):
        enough = [each for each in rewards if len(each) >= k]
        if enough:
            passed = [sum(reward >= pass_reward for reward in each) for each in enough]
            shares = [pass_at(right, len(each), k) for right, each in zip(passed, enough, strict=True)]
            metrics[f"{PREFIX}pass@{k}"] = fmean(shares)
        if enough and k > 1:
            metrics[f"{PREFIX}best@{k}"] = fmean(best_at(each, k) for each in enough)
    if rewards:
        metrics[f"{PREFIX}mean@{num_answers}"] = fmean(map(fmean, rewards))
    if num_answers > 1 and any(t.answer is not None for answers in problems for t in answers):
        votes = [majority(each, [t.answer for t in answers]) for each, answers in zip(rewards, problems, strict=True)]
        metrics[f"{PREFIX}maj@{num_answers}"] = fmean(votes)
    return metrics


def _graders(groups: Sequence[Group], names: SeriesNames) -> dict[str, float]:
    scored = [(group.task.data_source, t) for group in groups for t in group.trajectories if t.reward is not None]
    return {f"{PREFIX}{name}": value for name, value in describe_rewards(scored, names).items()}


def _under(name: str, metrics: dict[str, float]) -> dict[str, float]:
    return {f"{PREFIX}{name}/{key.removeprefix(PREFIX)}": value for key, value in metrics.items()}
