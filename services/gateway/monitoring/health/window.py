"""Gathers evidence from what services report. In memory: a restarted gateway begins with nothing."""

from collections import deque
from collections.abc import Mapping
from dataclasses import fields
from typing import Final, TypeVar

from services.gateway.monitoring.health.evidence import (
    Evidence,
    Facts,
    Graded,
    Sampled,
    StepFigures,
    groups_needed,
)
from shared.schemas.health import GradingReport, SampleExcerpt, SamplingReport

MOST_STEPS: Final = 64
MOST_REPORTS: Final = 256
FLAT: Final = "groups/flat_fraction"

Counts = TypeVar("Counts", Graded, Sampled)


def plus(first: Counts, second: Counts) -> Counts:
    """Add counts up."""
    return type(first)(*(getattr(first, f.name) + getattr(second, f.name) for f in fields(first)))


def since(now: Counts, before: Counts) -> Counts:
    """Subtract counts."""
    return type(now)(*(getattr(now, f.name) - getattr(before, f.name) for f in fields(now)))


class HealthWindow:
    """What was reported of one experiment since this process began, or since ``clear``."""

    def __init__(self) -> None:
        self._grading_before: dict[str, Graded] = {}
        self._sampling_before: dict[str, Sampled] = {}
        self.clear()

    def clear(self) -> None:
        """Forget what was seen, such as when the experiment starts again.

        Sessions that go on are counted from here: what they had reported is kept to subtract it.
        """
        self._steps: deque[StepFigures] = deque(maxlen=MOST_STEPS)
        self._graded: deque[Graded] = deque(maxlen=MOST_REPORTS)
        self._graded_ever = Graded()
        self._sampled: deque[Sampled] = deque(maxlen=MOST_REPORTS)
        self._last_reward: float | None = None
        self._highest_reward: float | None = None
        self._lowest_reward: float | None = None
        self._last_error: str | None = None
        self._special_token: str | None = None
        self._samples: tuple[SampleExcerpt, ...] = ()
        self.groups_without_signal = 0

    def add_grading(self, report: GradingReport) -> None:
        """Record what a reward service has graded so far."""
        now = Graded(**{f.name: getattr(report, f.name) for f in fields(Graded)})
        more = since(now, self._grading_before.get(report.session, Graded()))
        self._grading_before[report.session] = now
        if not more.groups:
            return
        self._graded.append(more)
        self._graded_ever = plus(self._graded_ever, more)
        self.groups_without_signal += more.signalless_groups
        self._last_reward = report.last_reward
        self._highest_reward = max([*_known(self._highest_reward), *_known(report.highest_reward)], default=None)
        self._lowest_reward = min([*_known(self._lowest_reward), *_known(report.lowest_reward)], default=None)
        self._last_error = report.last_error
        self._samples = report.samples_seen

    def add_sampling(self, report: SamplingReport) -> None:
        """Record what a rollout has sampled so far."""
        now = Sampled(**{f.name: getattr(report, f.name) for f in fields(Sampled)})
        more = since(now, self._sampling_before.get(report.session, Sampled()))
        self._sampling_before[report.session] = now
        if more.prompts:
            self._sampled.append(more)
            self._special_token = report.special_token

    def add_step(self, step: int, values: Mapping[str, float]) -> None:
        """Record a step's metrics; a step that is trained again replaces what came after it, too."""
        while self._steps and self._steps[-1].step >= step:
            self._steps.pop()
        self._steps.append(StepFigures(step, dict(values)))
        if values.get(FLAT, 0.0) < 1:
            self.groups_without_signal = 0

    def evidence(self, facts: Facts) -> Evidence:
        """Put together what a check looks at."""
        return Evidence(
            facts=facts,
            graded=_newest(self._graded, Graded(), groups_needed(facts)),
            graded_ever=self._graded_ever,
            sampled=_newest(self._sampled, Sampled(), groups_needed(facts)),
            steps=tuple(self._steps),
            last_reward=self._last_reward,
            highest_reward=self._highest_reward,
            lowest_reward=self._lowest_reward,
            last_error=self._last_error,
            special_token=self._special_token,
            samples=self._samples,
        )


def _newest(parts: "deque[Counts]", nothing: Counts, wanted: int) -> Counts:
    """Add up the newest parts until there are so many groups, or prompts."""
    total = nothing
    for part in reversed(parts):
        if (total.groups if isinstance(total, Graded) else total.prompts) >= wanted:
            break
        total = plus(total, part)
    return total


def _known(value: float | None) -> tuple[float, ...]:
    return () if value is None else (value,)
