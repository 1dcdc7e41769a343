"""What a run recorded of its speed, as far as a prediction needs it. Typed facts and sums of them; pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from flotilla.shared.config.spec import ExperimentSpec

BEGINNING: int = 2
"""Steps that are left out, where there are others: processes warm up, and nothing was under way before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedGroup:
    """A group in training; times in seconds since the epoch.

    Attributes:
        kind: ``trained`` or ``filtered``.
        lengths: sampled tokens, per answer.
        totals: tokens with those of the prompt, per answer.
        rewards: per answer; None without one.
    """

    group_id: int
    kind: str
    issued_at: float
    generated_at: float
    graded_at: float
    generation_seconds: float
    grading_seconds: float
    lengths: tuple[int, ...]
    totals: tuple[int, ...]
    rewards: tuple[float | None, ...]

    @property
    def started_at(self) -> float:
        """When the engine was asked."""
        return self.generated_at - self.generation_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """A step of the trainer; durations in seconds."""

    step: int
    ended_at: float
    wait: float
    compute: float
    publish: float
    checkpoint: float
    tokens: float
    lag: float

    @property
    def computed_from(self) -> float:
        """When it began to compute."""
        return self.ended_at - self.checkpoint - self.publish - self.compute


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """A run.

    Attributes:
        rollouts: that were members of its publications.
        groups: that were trained, and those of the filtered ones that were kept.
        steps: in their order, one after the other.
        publication_seconds: from the end of training a version until it was committed.
        switch_seconds: then until all engines served it.
        filtered_share: of the groups that were graded.
        engine_cores, trainer_cores: that each took while it computed; None where nobody recorded it.
    """

    spec: ExperimentSpec
    rollouts: int
    groups: Sequence[RecordedGroup]
    steps: Sequence[RecordedStep]
    publication_seconds: float
    switch_seconds: float
    filtered_share: float
    engine_cores: float | None
    trainer_cores: float | None

    @property
    def measured_steps(self) -> Sequence[RecordedStep]:
        """Those after the beginning."""
        return self.steps[min(BEGINNING, len(self.steps) - 1) :]

    @property
    def step_seconds(self) -> float:
        """Mean from one step's end to the next one's."""
        measured = self.measured_steps
        before = self.steps[len(self.steps) - len(measured) - 1]
        return (measured[-1].ended_at - before.ended_at) / len(measured)

    @property
    def tokens_per_second(self) -> float:
        """Trained tokens."""
        return fmean(each.tokens for each in self.measured_steps) / self.step_seconds

    @property
    def lag(self) -> float:
        """Mean of a trained token, in versions."""
        measured = self.measured_steps
        return sum(each.lag * each.tokens for each in measured) / max(1.0, sum(each.tokens for each in measured))
