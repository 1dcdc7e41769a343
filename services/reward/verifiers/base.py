"""What every verifier is, and how one that only compares text is made of a pure function."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from flotilla.shared.config.sections.reward import MatchConfig
from flotilla.shared.schemas.grade_status import GradeStatus
from flotilla.shared.schemas.grading import Grade, GradingSample
from flotilla.shared.schemas.health import MOST_GRADERS, GraderReport
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
    """A verifier that grades one sample after the other, cheaply and without state."""

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
    """A verifier that calls a server, and reports it while it does not answer."""

    @property
    def problem(self) -> Failure | None:
        """A server that did not answer when it was last asked; None if each did."""


GraderReports = Mapping[str, GraderReport]
"""What the components of a reward did, by their names."""


@runtime_checkable
class Reweighs(Protocol):
    """A verifier of several components whose weights can be others for one group."""

    def reweighed(self, weights: Mapping[int, float]) -> Verifier:
        """Make one that grades by the same components with other weights, by their numbers."""


@runtime_checkable
class CountsGrades(Protocol):
    """A verifier of several components that counts what each of them does."""

    @property
    def graders(self) -> GraderReports:
        """What each did so far, by its name."""


class GraderFigures:
    """Of one component.

    Args:
        name: of the component.
        now: a clock in seconds that never goes back.
    """

    def __init__(self, name: str, now: Callable[[], float]) -> None:
        self.name = name
        self._now = now
        self._calls = self._samples = self._errors = self._abstained = 0
        self._seconds = self._slowest = 0.0

    async def of_call(self, grading: Awaitable[Sequence[Grade]]) -> Sequence[Grade]:
        """Await the grades of a call and count them; a cancelled one is not counted."""
        began = self._now()
        grades = await grading
        seconds = self._now() - began
        self._calls += 1
        self._seconds += seconds
        self._slowest = max(self._slowest, seconds)
        self._samples += len(grades)
        self._errors += sum(grade.status is GradeStatus.ERROR for grade in grades)
        self._abstained += sum(grade.status is GradeStatus.ABSTAINED for grade in grades)
        return grades

    def report(self) -> GraderReport:
        """Make what is reported."""
        return GraderReport(
            calls=self._calls,
            samples=self._samples,
            errors=self._errors,
            abstained=self._abstained,
            seconds=round(self._seconds, 3),
            slowest_seconds=round(self._slowest, 3),
        )


def reports_of(figures: Sequence[GraderFigures]) -> GraderReports:
    """Make what is reported of several components, by their names."""
    return {each.name: each.report() for each in figures[:MOST_GRADERS]}


NO_LABEL = "the sample has no label to compare with"


LONGEST_ANSWER = 256
"""Characters of an answer that a grade keeps."""


def verdict(config: MatchConfig, *, is_correct: bool, answer: str | None) -> Grade:
    """Make the grade of a right or a wrong answer, or of none."""
    kept = None if answer is None else answer.strip()[:LONGEST_ANSWER]
    return Grade.scored(config.correct if is_correct else config.incorrect, answer=kept)
