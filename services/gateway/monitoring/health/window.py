"""Gathers evidence from what services report. ``keeping`` lets it outlive the gateway's process."""

from collections import deque
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final, TypeVar

from flotilla.services.gateway.monitoring.health.drift import component_series
from flotilla.services.gateway.monitoring.health.evidence import (
    Audited,
    Evidence,
    Facts,
    Graded,
    Sampled,
    StepFigures,
    groups_needed,
)
from flotilla.services.gateway.monitoring.health.gaps import gap_series
from flotilla.services.gateway.monitoring.health.memory import MemorySeries
from flotilla.services.gateway.monitoring.health.sources import SourceSeries, groups_wanted
from flotilla.shared.config.sections.reward import AuditConfig
from flotilla.shared.schemas.health import GradingReport, SampleExcerpt, SamplingReport

MOST_STEPS: Final = 64
MOST_REPORTS: Final = 256
FLAT: Final = "groups/flat_fraction"
LOOKED_AT: Final = (
    "updates/in_step",
    "updates/skipped",
    "grad_norm",
    "loss/total",
    "lag/max",
    "kl/mean",
    "entropy",
    "ratio/approx_kl",
    "correction/log_ppl_abs_diff",
)
"""The figures of a step that checks look at: no others are kept for the gateway after this one."""

WITHOUT_AUDIT: Final[Mapping[str, Any]] = {"audited": [], "audited_samples": [], "last_audit_error": None}
"""What ``to_window`` describes after ``clear_audit``."""

Counts = TypeVar("Counts", Graded, Sampled, Audited)
Groups = TypeVar("Groups", Graded, Sampled)


def plus(first: Counts, second: Counts) -> Counts:
    """Add counts up."""
    return type(first)(*(getattr(first, f.name) + getattr(second, f.name) for f in fields(first)))


def _flat(counts: Graded | Sampled | Audited) -> dict[str, float]:
    """Write counts as JSON; ``asdict`` copies each number, of hundreds of reports every few seconds."""
    return {name: getattr(counts, name) for name in _NAMES[type(counts)]}


_NAMES = {kind: tuple(field.name for field in fields(kind)) for kind in (Graded, Sampled, Audited)}


def since(now: Counts, before: Counts) -> Counts:
    """Subtract counts."""
    return type(now)(*(getattr(now, f.name) - getattr(before, f.name) for f in fields(now)))


class HealthWindow:
    """What was reported of one experiment since it was started, or since ``clear``.

    Attributes:
        num_changes: how often what ``to_window`` describes has changed.
        groups_without_signal: groups in a row that taught nothing.
        memory: of the experiment's processes; it is not kept for the gateway after this one.
    """

    def __init__(self) -> None:
        self.num_changes = 0
        self.memory = MemorySeries()
        self._grading_before: dict[str, Graded] = {}
        self._sampling_before: dict[str, Sampled] = {}
        self._audit_before: dict[str, Audited] = {}
        self._sources = SourceSeries()
        self.clear()

    def clear(self) -> None:
        """Forget what was seen, such as when the experiment starts again.

        Sessions that continue are counted from here: what they had reported is kept to subtract it.
        """
        self.memory.clear()
        self._sources.clear()
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
        self._ungraded_sample: SampleExcerpt | None = None
        self._alike_samples: tuple[SampleExcerpt, ...] = ()
        self.groups_without_signal = 0
        self.clear_audit()

    def clear_audit(self) -> None:
        """Forget second grades, such as when they have paused the experiment: it takes others to pause it again."""
        self._audited: deque[Audited] = deque(maxlen=MOST_REPORTS)
        self._audited_samples: tuple[SampleExcerpt, ...] = ()
        self._last_audit_error: str | None = None
        self.num_changes += 1

    def to_window(self) -> dict[str, Any]:
        """Describe what was seen as JSON, for ``restore``."""
        return {
            "grading_before": {session: _flat(counts) for session, counts in self._grading_before.items()},
            "sampling_before": {session: _flat(counts) for session, counts in self._sampling_before.items()},
            "audit_before": {session: _flat(counts) for session, counts in self._audit_before.items()},
            "audited": [_flat(counts) for counts in self._audited],
            "audited_samples": [sample.model_dump(mode="json") for sample in self._audited_samples],
            "last_audit_error": self._last_audit_error,
            "steps": [
                [
                    step.step,
                    {name: step.values[name] for name in LOOKED_AT if name in step.values}
                    | step.chosen(component_series)
                    | step.chosen(gap_series),
                ]
                for step in self._steps
            ],
            "alike_samples": [sample.model_dump(mode="json") for sample in self._alike_samples],
            "graded": [_flat(counts) for counts in self._graded],
            "graded_ever": _flat(self._graded_ever),
            "sampled": [_flat(counts) for counts in self._sampled],
            "last_reward": self._last_reward,
            "highest_reward": self._highest_reward,
            "lowest_reward": self._lowest_reward,
            "last_error": self._last_error,
            "special_token": self._special_token,
            "samples": [sample.model_dump(mode="json") for sample in self._samples],
            "ungraded_sample": None if self._ungraded_sample is None else self._ungraded_sample.model_dump(mode="json"),
            "groups_without_signal": self.groups_without_signal,
            "sources": self._sources.to_window(),
        }

    def restore(self, kept: Mapping[str, Any], *, is_same_start: bool) -> None:
        """Continue where an earlier gateway was, before anything is recorded.

        Args:
            kept: as ``to_window`` described it; empty where nothing was kept.
            is_same_start: the experiment was not started again since: else sessions alone are taken over, so that
                those that continue are counted from there.
        """
        self._grading_before = {name: Graded(**counts) for name, counts in kept.get("grading_before", {}).items()}
        self._sampling_before = {name: Sampled(**counts) for name, counts in kept.get("sampling_before", {}).items()}
        self._audit_before = {name: Audited(**counts) for name, counts in kept.get("audit_before", {}).items()}
        self._sources.restore(kept.get("sources", {}), is_same_start=is_same_start)
        if not kept or not is_same_start:
            return
        self._audited.extend(Audited(**counts) for counts in kept.get("audited", ()))
        self._audited_samples = tuple(map(SampleExcerpt.model_validate, kept.get("audited_samples", ())))
        self._last_audit_error = kept.get("last_audit_error")
        self._steps.extend(StepFigures(step, dict(values)) for step, values in kept["steps"])
        self._graded.extend(Graded(**counts) for counts in kept["graded"])
        self._graded_ever = Graded(**kept["graded_ever"])
        self._sampled.extend(Sampled(**counts) for counts in kept["sampled"])
        self._last_reward, self._last_error = kept["last_reward"], kept["last_error"]
        self._highest_reward, self._lowest_reward = kept["highest_reward"], kept["lowest_reward"]
        self._special_token = kept["special_token"]
        self._samples = tuple(SampleExcerpt.model_validate(sample) for sample in kept["samples"])
        self._alike_samples = tuple(map(SampleExcerpt.model_validate, kept.get("alike_samples", ())))
        ungraded = kept.get("ungraded_sample")  # absent from what an older gateway kept
        self._ungraded_sample = None if ungraded is None else SampleExcerpt.model_validate(ungraded)
        self.groups_without_signal = kept["groups_without_signal"]

    def add_grading(self, report: GradingReport) -> None:
        """Record what a reward service has graded so far."""
        now = Graded(**{f.name: getattr(report, f.name) for f in fields(Graded)})
        more = since(now, self._grading_before.get(report.session, Graded()))
        self._grading_before[report.session] = now
        self._add_audits(report)
        self._sources.add(report)
        if not more.groups:
            return
        self.num_changes += 1
        self._graded.append(more)
        self._graded_ever = plus(self._graded_ever, more)
        self.groups_without_signal += more.signalless_groups
        self._last_reward = report.last_reward
        self._highest_reward = max([*_known(self._highest_reward), *_known(report.highest_reward)], default=None)
        self._lowest_reward = min([*_known(self._lowest_reward), *_known(report.lowest_reward)], default=None)
        self._last_error = report.last_error
        self._samples = report.samples_seen
        self._ungraded_sample = report.ungraded_sample or self._ungraded_sample
        self._alike_samples = report.alike_samples or self._alike_samples

    def _add_audits(self, report: GradingReport) -> None:
        now = Audited(**{f.name: getattr(report, f.name) for f in fields(Audited)})
        more = since(now, self._audit_before.get(report.session, Audited()))
        self._audit_before[report.session] = now
        if more.audited_groups or more.failed_audits:
            self.num_changes += 1
            self._audited.append(more)
            self._audited_samples = report.audited_samples or self._audited_samples
            self._last_audit_error = report.last_audit_error or self._last_audit_error

    def audited(self, config: AuditConfig) -> Audited:
        """Add up the second grades of the newest groups."""
        found = Audited()
        for each in reversed(self._audited):
            found = plus(found, each)
            if found.chosen_groups >= config.window:
                break
        return found

    def add_sampling(self, report: SamplingReport) -> None:
        """Record what a rollout has sampled so far."""
        now = Sampled(**{f.name: getattr(report, f.name) for f in fields(Sampled)})
        more = since(now, self._sampling_before.get(report.session, Sampled()))
        self._sampling_before[report.session] = now
        if more.prompts:
            self.num_changes += 1
            self._sampled.append(more)
            self._special_token = report.special_token

    def add_step(self, step: int, values: Mapping[str, float]) -> None:
        """Record a step's metrics; a step that is trained again replaces what came after it, too."""
        while self._steps and self._steps[-1].step >= step:
            self._steps.pop()
        self._steps.append(StepFigures(step, dict(values)))
        self.num_changes += 1
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
            ungraded_sample=self._ungraded_sample,
            audited=Audited() if facts.audit is None else self.audited(facts.audit),
            audited_samples=self._audited_samples,
            last_audit_error=self._last_audit_error,
            alike_samples=self._alike_samples,
            memory=self.memory.slopes(),
            sources=self._sources.counts(groups_wanted(facts)),
        )


def _newest(parts: "deque[Groups]", nothing: Groups, wanted: int) -> Groups:
    """Add up the newest parts until there are so many groups, or prompts."""
    total = nothing
    for part in reversed(parts):
        if (total.groups if isinstance(total, Graded) else total.prompts) >= wanted:
            break
        total = plus(total, part)
    return total


def _known(value: float | None) -> tuple[float, ...]:
    return () if value is None else (value,)
