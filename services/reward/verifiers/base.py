"""What every verifier is, and how one that only compares text is made of a pure function."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from flotilla.shared.config.sections.reward import MatchConfig
from flotilla.shared.schemas.grading import Grade, GradingSample
from flotilla.shared.schemas.service import Failure


class Verifier(Protocol):
    """Grades samples. A failure is a grade with status error, never a reward and never an exception."""

    async def score(self, samples: Sequence[GradingSample]) -> list[Grade]:
        """Grade each sample.

        Returns:
            As many grades as samples, in their order.
        """

    async def aclose(self) -> None:
        """Release processes and connections. Nothing may be graded afterwards."""


class SampleVerifier(ABC):
    """A verifier that looks at one sample after the other, computes little and holds nothing."""

    @abstractmethod
    def grade(self, sample: GradingSample) -> Grade:
        """Grade one sample."""

    async def score(self, samples: Sequence[GradingSample]) -> list[Grade]:
        """Grade each sample."""
        return [self.grade(sample) for sample in samples]

    async def aclose(self) -> None:  # noqa: B027  another one that holds something may say so
        """Nothing is held."""


@runtime_checkable
class AsksServer(Protocol):
    """A verifier that asks a server, and says so while it does not answer."""

    @property
    def problem(self) -> Failure | None:
        """A server that did not answer when it was last asked; None if each did."""


NO_LABEL = "the sample has no label to compare with"


LONGEST_ANSWER = 256
"""Characters of an answer that a grade keeps."""


def verdict(config: MatchConfig, *, is_correct: bool, answer: str | None) -> Grade:
    """Make the grade of a right or a wrong answer, or of none."""
    kept = None if answer is None else answer.strip()[:LONGEST_ANSWER]
    return Grade.scored(config.correct if is_correct else config.incorrect, answer=kept)
