"""What several answers to one problem are worth: pure functions of their rewards.

All are exact: over the draws of k of the n answers *without* replacement they take the expectation, by counting. verl
draws 1,000 times with replacement instead, so its ``best@n`` is below the best of the n.

Sources: Chen et al., Evaluating Large Language Models Trained on Code, 2021, eq. 1 (pass@k); Wang et al.,
Self-Consistency, 2022 (majority).
"""

import math
from collections.abc import Sequence


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
