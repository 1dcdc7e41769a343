"""The inputs of training-health checks: the last steps' figures, and what was graded and sampled lately."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from flotilla.shared.config.sections.health import HealthConfig
from flotilla.shared.config.sections.reward import AuditConfig, MatchConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.schemas.health import SampleExcerpt

Choose = Callable[[Mapping[str, float]], dict[str, float]]
"""Chooses some of a step's figures, by their names."""
MIN_SAMPLES = 16
"""What happens to so many samples in a row is no chance."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a check needs to know of the spec.

    Attributes:
        thresholds: the spec's section.
        groups_per_step: R.
        names_answers: whether every grader reports the extracted answer.
        max_new_tokens: of a completion.
        updates_per_version: optimiser updates of a version: after the first, weights are not those that sampled.
        learning_rate: peak.
        is_graded: whether what is trained on was graded.
        learns_from_rewards: whether a difference between rewards is what is learned from.
        records_the_cut: whether the engine's log-probabilities are after cuts, and those of the trainer before them.
        is_dump: whether groups of another run are trained, whose weights may have been others.
        audit: the section of the second grade; None without one.
        left_out: data sources that no rows are taken of any more, since their weight is 0.
    """

    thresholds: HealthConfig
    groups_per_step: int
    names_answers: bool
    max_new_tokens: int
    updates_per_version: int
    learning_rate: float
    is_graded: bool = True
    learns_from_rewards: bool = True
    records_the_cut: bool = False
    is_dump: bool = False
    audit: AuditConfig | None = None
    left_out: frozenset[str] = frozenset()

    @property
    def compares_log_probs(self) -> bool:
        """Whether the engine's log-probabilities of tokens of lag 0 are what the trainer's should be."""
        return not (self.records_the_cut or self.is_dump)


def facts_of(spec: ExperimentSpec) -> Facts:
    """Read from a spec what checks need to know."""
    return Facts(
        thresholds=spec.health,
        groups_per_step=spec.groups_per_step,
        names_answers=all(isinstance(each, MatchConfig) for each in spec.reward.components),
        max_new_tokens=spec.rollout.sampling.max_new_tokens,
        updates_per_version=spec.asynchrony.require_batches * spec.steps_per_version,
        learning_rate=spec.optimisation.learning_rate,
        is_graded=spec.finished_job is None,
        learns_from_rewards=not spec.algorithm.is_pure_distillation,
        records_the_cut=spec.rollout.records_the_cut,
        is_dump=spec.data.holds_groups,
        audit=spec.reward.audit,
        left_out=frozenset(
            name for each in spec.data.sources or () if each.weight == 0 for name in each.known_data_sources
        ),
    )


@dataclass(frozen=True, slots=True)
class Graded:
    """Counts of ``GradingReport`` over some groups; see there."""

    groups: int = 0
    flat_groups: int = 0
    identical_groups: int = 0
    alike_groups: int = 0
    signalless_groups: int = 0
    filtered_groups: int = 0
    samples: int = 0
    scored: int = 0
    errors: int = 0
    label_errors: int = 0
    truncated: int = 0
    empty: int = 0
    answered: int = 0
    repeated: int = 0


@dataclass(frozen=True, slots=True)
class Sampled:
    """Counts of ``SamplingReport`` over some prompts; see there."""

    prompts: int = 0
    doubled_special: int = 0
    without_start: int = 0
    completions: int = 0
    past_special: int = 0


@dataclass(frozen=True, slots=True)
class Audited:
    """Counts of second grades in ``GradingReport`` over some groups; see there."""

    audited_groups: int = 0
    failed_audits: int = 0
    audit_disagreement: float = 0.0
    audit_higher: float = 0.0
    audit_missing: float = 0.0

    @property
    def chosen_groups(self) -> int:
        """Groups that a second grade was asked for."""
        return self.audited_groups + self.failed_audits


@dataclass(frozen=True, slots=True)
class SourceCounts:
    """Counts of ``SourceReport`` over the newest groups of one data source; see there."""

    groups: int = 0
    signalless_groups: int = 0
    sample: SampleExcerpt | None = None


@dataclass(frozen=True, slots=True)
class MemorySlope:
    """How the memory of one process grows.

    Attributes:
        service_id: whose process it is.
        process: kind of the service and name of the process, such as ``rollout/engine``.
        bytes: the newest figure.
        slope, error: bytes for 100 steps, and their standard error.
        steps: that it is of.
        rises: whether each third of the points lies above the one before, on average.
    """

    service_id: str
    process: str
    bytes: float
    slope: float
    error: float
    steps: int
    rises: bool


@dataclass(frozen=True, slots=True)
class StepFigures:
    """The metrics of one step, by name."""

    step: int
    values: Mapping[str, float]
    _chosen: dict[Choose, dict[str, float]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def chosen(self, choose: Choose) -> dict[str, float]:
        """Choose some of the values; the same ones when asked again, as is done every second for dozens of steps."""
        if choose not in self._chosen:
            self._chosen[choose] = choose(self.values)
        return self._chosen[choose]


@dataclass(frozen=True, slots=True)
class Evidence:
    """All inputs of a check; a pure value.

    Attributes:
        graded: of the newest groups, at least ``min_groups`` and ``steps`` steps' worth once there are so many.
        graded_ever: of all groups since the window began.
        sampled: of the same time, more or less.
        steps: the run's steps, oldest first; the newest 64.
        last_reward, last_error, special_token, samples, ungraded_sample: of the newest reports.
        highest_reward, lowest_reward: that any report had.
        audited: of the newest audited groups.
        audited_samples: whose two grades disagree.
        alike_samples: two answers of a group that nearly repeat each other.
        memory: of each process that has been looked at for long enough.
        sources: by name, of the newest groups of each, ``min_groups`` and more once there are so many.
        last_audit_error: what the second grader said where it gave none.
    """

    facts: Facts
    graded: Graded = Graded()
    graded_ever: Graded = Graded()
    sampled: Sampled = Sampled()
    steps: Sequence[StepFigures] = ()
    last_reward: float | None = None
    highest_reward: float | None = None
    lowest_reward: float | None = None
    last_error: str | None = None
    special_token: str | None = None
    samples: tuple[SampleExcerpt, ...] = ()
    ungraded_sample: SampleExcerpt | None = None
    audited: Audited = Audited()
    audited_samples: tuple[SampleExcerpt, ...] = ()
    last_audit_error: str | None = None
    alike_samples: tuple[SampleExcerpt, ...] = ()
    memory: tuple[MemorySlope, ...] = ()
    sources: Mapping[str, SourceCounts] = field(default_factory=dict)

    @property
    def is_enough_graded(self) -> bool:
        """Whether there are as many groups as a check of them needs."""
        return self.graded.groups >= groups_needed(self.facts)

    @property
    def is_enough(self) -> bool:
        """Whether what is not found is really over."""
        return (self.is_enough_graded or not self.facts.is_graded) and len(self.steps) >= self.facts.thresholds.steps

    @property
    def is_reward_constant(self) -> bool:
        """Whether all samples that were scored lately have the same reward."""
        seen = self.graded
        return self.is_enough_graded and MIN_SAMPLES <= seen.scored <= seen.repeated + 1

    @property
    def did_rewards_differ(self) -> bool:
        """Whether they differed, then or before.

        The first sample that a reward service grades repeats none, whatever others graded: so the bounds count, too.
        """
        return self.graded_ever.scored > self.graded_ever.repeated + 1 and self.highest_reward != self.lowest_reward

    def recent(self, name: str) -> list[float]:
        """Give the last ``thresholds.steps`` values of a series that reach to the newest step, oldest first."""
        newest = self.steps[-self.facts.thresholds.steps :]
        return [step.values[name] for step in newest if name in step.values]


def groups_needed(facts: Facts) -> int:
    """Count the groups that checks of rewards look back at."""
    return max(facts.thresholds.min_groups, facts.thresholds.steps * facts.groups_per_step)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a check found.

    Attributes:
        text: one sentence, with figures.
        figures: the same, by name.
        advice: what to do, where it depends on what was seen; None takes the check's.
        sample: that shows it; None where any does.
        samples: that show it, where there are several.
        subject: what it is of, where that is one of several: a service, a component of the reward, a data source.
    """

    text: str
    figures: Mapping[str, float] = field(default_factory=dict)
    advice: str | None = None
    sample: SampleExcerpt | None = None
    samples: tuple[SampleExcerpt, ...] = ()
    subject: str | None = None
