"""The environment's own rewards as a component: it has graded each turn already."""

from collections.abc import Sequence
from math import fsum

from flotilla.shared.schemas.grading import Grade, GradingSample


class EnvironmentVerifier:
    """Sums the rewards of an episode's turns; abstains where no environment gave any."""

    async def score(self, samples: Sequence[GradingSample]) -> list[Grade]:
        """Grade each sample."""
        return [_grade(sample) for sample in samples]

    async def aclose(self) -> None:
        """Nothing is held."""


def _grade(sample: GradingSample) -> Grade:
    rewards = [turn.reward for turn in sample.turns if turn.reward is not None]
    if not rewards:
        return Grade.abstained("no environment gave a reward")
    return Grade.scored(fsum(rewards))
