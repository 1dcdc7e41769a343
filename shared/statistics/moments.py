"""Mean and deviation of numbers that come a few at a time."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True, slots=True)
class RunningMoments:
    """Mean and variance of every reward so far; plain numbers, so that a checkpoint holds them to the last bit.

    Args:
        count: rewards seen.
        mean: of all of them.
        variance: of the population, not the unbiased one.
    """

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def updated(self, rewards: ArrayLike) -> "RunningMoments":
        """Merge a batch of rewards.

        Source: Chan, Golub, LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979.
        """
        batch = np.asarray(rewards, dtype=np.float64).ravel()
        if batch.size == 0:
            return self
        total = self.count + batch.size
        difference = float(batch.mean()) - self.mean
        squares = self.variance * self.count + float(batch.var()) * batch.size
        squares += difference**2 * self.count * batch.size / total
        return RunningMoments(total, self.mean + difference * batch.size / total, squares / total)

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 0 for fewer than two rewards."""
        return math.sqrt(self.variance * self.count / (self.count - 1)) if self.count > 1 else 0.0


NOTHING_SEEN = RunningMoments()
"""Before the first."""
