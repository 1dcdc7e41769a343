"""What services count for the training-health checks, and what those find."""

from collections.abc import Mapping

from pydantic import Field

from flotilla.shared.schemas.wire import TolerantWire

LONGEST_TEXT = 400
LONGEST_WORDS = 200
MOST_AUDITED = 4


class SampleExcerpt(TolerantWire):
    """One graded sample, cut for people to read."""

    prompt: str
    completion: str
    label: str | None = None
    answer: str | None = None
    """What the grader took for the answer."""
    reward: float | None = None
    reason: str | None = None
    """Why there is no reward."""
    finish_reason: str = ""
    audit_reward: float | None = None
    """The hidden second grade, where it disagrees."""


class GraderReport(TolerantWire):
    """What one component of the reward did since the session began, in training and evaluation. Counts only grow."""

    calls: int = Field(0, ge=0)
    """Of one or more samples each."""
    samples: int = Field(0, ge=0)
    errors: int = Field(0, ge=0)
    """Samples without a grade since grading failed."""
    abstained: int = Field(0, ge=0)
    """Samples that it is not for, or does not judge."""
    seconds: float = Field(0, ge=0)
    """All calls together, from the call to the last grade, repetitions included."""
    slowest_seconds: float = Field(0, ge=0)
    """The longest call."""


MOST_GRADERS = 64
"""Components that are reported of one reward service."""


class RowOutcome(TolerantWire):
    """How a row was answered once."""

    number: int = Field(ge=1)
    """Counts the outcomes of a session."""
    row: int = Field(ge=0)
    reward: float
    """Mean of the group's scored members, as graded."""


MOST_OUTCOMES = 256


class SourceReport(TolerantWire):
    """Groups of one data source that were graded since the session began. Counts only grow."""

    groups: int = Field(0, ge=0)
    signalless_groups: int = Field(0, ge=0)
    """Flat, or filtered because they teach nothing."""
    sample: SampleExcerpt | None = None
    """Of the newest of these."""


MOST_SOURCES = 64
"""Data sources that are reported of one reward service."""


class GradingReport(TolerantWire):
    """What one reward service has graded in training since its session began. Counts only grow."""

    session: str
    """Random name of the session: the counts of another one begin at 0."""
    groups: int = Field(0, ge=0)
    flat_groups: int = Field(0, ge=0)
    """Of several scored members, all with the same reward."""
    identical_groups: int = Field(0, ge=0)
    """Of several members, all with the same text."""
    alike_groups: int = Field(0, ge=0)
    """Of several members, of which most nearly repeat another."""
    alike_samples: tuple[SampleExcerpt, ...] = Field((), max_length=2)
    """Two members of the newest of them."""
    signalless_groups: int = Field(0, ge=0)
    """Flat, or filtered because they teach nothing: nothing is learned from them."""
    filtered_groups: int = Field(0, ge=0)
    samples: int = Field(0, ge=0)
    """Completions, however they ended."""
    scored: int = Field(0, ge=0)
    errors: int = Field(0, ge=0)
    label_errors: int = Field(0, ge=0)
    """Of the errors, those that a missing or unusable label made."""
    truncated: int = Field(0, ge=0)
    """Ended at the length limit."""
    empty: int = Field(0, ge=0)
    """Without any text."""
    answered: int = Field(0, ge=0)
    """In which the grader found an answer."""
    repeated: int = Field(0, ge=0)
    """Scored with the same reward as the one scored before."""
    last_reward: float | None = None
    highest_reward: float | None = None
    lowest_reward: float | None = None
    last_error: str | None = None
    samples_seen: tuple[SampleExcerpt, ...] = Field((), max_length=2)
    """Two of the newest, with different rewards where there are such."""
    ungraded_sample: SampleExcerpt | None = None
    """The newest without a reward."""
    outcomes: tuple[RowOutcome, ...] = Field((), max_length=MOST_OUTCOMES)
    """The newest, oldest first, where the experiment has a curriculum."""
    audited_groups: int = Field(0, ge=0)
    """Of which samples have a second grade to compare with."""
    failed_audits: int = Field(0, ge=0)
    """Groups of which no sample has a second grade, though some have a first: it failed, or abstained from all."""
    audit_disagreement: float = Field(0.0, ge=0)
    """Sum over audited groups of the share of samples whose two grades disagree."""
    audit_higher: float = Field(0.0, ge=0)
    """The same of those whose reward is above the second grade."""
    audit_missing: float = Field(0.0, ge=0)
    """Sum over audited groups and those whose audit failed of the share of graded samples without a second grade."""
    last_audit_error: str | None = Field(None, max_length=LONGEST_WORDS)
    """The second grader's figures for the newest of them."""
    audited_samples: tuple[SampleExcerpt, ...] = Field((), max_length=MOST_AUDITED)
    """The newest whose grades disagree."""
    graders: Mapping[str, GraderReport] = Field(default_factory=dict, max_length=MOST_GRADERS)
    """By the component's name."""
    sources: Mapping[str, SourceReport] = Field(default_factory=dict, max_length=MOST_SOURCES)
    """By the data source of the rows, where rows name one."""


class SamplingReport(TolerantWire):
    """What one rollout has sampled in training since its session began, as its tokenizer sees it. Counts only grow."""

    session: str
    prompts: int = Field(0, ge=0)
    doubled_special: int = Field(0, ge=0)
    """Prompts with a special token twice in a row."""
    without_start: int = Field(0, ge=0)
    """Prompts that do not begin with the special tokens that the tokenizer begins every text with."""
    completions: int = Field(0, ge=0)
    past_special: int = Field(0, ge=0)
    """Completions that continue after a special token, which ends none of them."""
    special_token: str | None = None
    """The token of the newest such finding."""


class HealthFinding(TolerantWire):
    """A training-health check that finds something."""

    check: str
    """Its name, as in docs/health.md."""
    component: str
    """reward, rollout or trainer."""
    since_step: int
    """The step that was done last when it began."""
    at: str
    seen: str
    """What was seen, with figures."""
    advice: str
    command: str | None = None
    """What makes the change that would help, where a command does."""
    figures: Mapping[str, float] = Field(default_factory=dict)
    samples: tuple[SampleExcerpt, ...] = ()
