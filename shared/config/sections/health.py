"""Which training-health checks watch an experiment, and how patiently. They warn; one bound may end it."""

from enum import StrEnum

from pydantic import Field

from flotilla.shared.config.base.model import Config


class CheckName(StrEnum):
    """The training-health checks; docs/health.md describes each."""

    GRADER_FAILING = "grader_failing"
    GRADES_MISSING = "grades_missing"
    WRONG_LABELS = "wrong_labels"
    GRADERS_DISAGREE = "graders_disagree"
    AUDIT_MISSING = "audit_missing"
    COMPONENTS_DRIFT = "components_drift"
    NEAR_DUPLICATES = "near_duplicates"
    NO_ANSWER_FOUND = "no_answer_found"
    NEVER_RIGHT = "never_right"
    CONSTANT_REWARD = "constant_reward"
    NOTHING_LEFT = "nothing_left"
    NO_SIGNAL = "no_signal"
    DEAD_SOURCE = "dead_source"
    ALWAYS_TRUNCATED = "always_truncated"
    EMPTY_COMPLETIONS = "empty_completions"
    TEMPLATE_MISMATCH = "template_mismatch"
    NOT_FINITE = "not_finite"
    DIVERGING = "diverging"
    COLLAPSED = "collapsed"
    ENGINE_MISMATCH = "engine_mismatch"
    ENGINE_GAP_GROWS = "engine_gap_grows"
    ROLLOUT_DIFFERS = "rollout_differs"
    ENTROPY_GONE = "entropy_gone"
    KL_EXPLODING = "kl_exploding"
    MEMORY_CREEPS = "memory_creeps"


class HealthConfig(Config):
    """Training-health checks: what they call a finding. A finding is shown and ends nothing."""

    skip: tuple[CheckName, ...] = ()
    """Checks that are not made."""
    max_groups_without_signal: int | None = Field(None, ge=1)
    """The experiment fails, resumable, once this many groups in a row taught nothing (verl's ``max_num_gen_batches``
    times its batch): all members the same reward, or filtered. A step that trained on others starts the count again.
    Null: it continues."""
    steps: int = Field(3, ge=1)
    """Steps, and steps' worth of groups, that a check looks back."""
    min_groups: int = Field(48, ge=1)
    """Groups at least, for checks of rewards and completions: few of them may be alike by chance."""
    signalless_share: float = Field(0.98, gt=0, le=1)
    """Groups that taught nothing, where ``no_signal`` sees a dead signal, and ``dead_source`` a dead data source."""
    failed_share: float = Field(0.9, gt=0, le=1)
    """Samples whose grading failed, where ``grader_failing`` and ``wrong_labels`` see one that cannot work."""
    ungraded_share: float = Field(0.05, gt=0, le=1)
    """Samples whose grading failed, or that every grader abstained from, at which ``grades_missing`` warns."""
    drift: float = Field(0.1, gt=0)
    """By how much one component of the reward has risen and another fallen at which `components_drift` warns, from
    the first to the second half of the last 64 steps."""
    alike_share: float = Field(0.5, gt=0, le=1)
    """Groups most of whose answers nearly repeat another one, at which `near_duplicates` warns."""
    truncated_share: float = Field(0.95, gt=0, le=1)
    """Completions that ended at the length limit, or are empty."""
    kl: float = Field(2.0, gt=0)
    """Nats per token between policy and reference."""
    engine_gap: float = Field(0.2, gt=0)
    """Nats per token between engine and trainer on tokens that the trained weights themselves sampled."""
    policy_move: float = Field(1.0, gt=0)
    """Nats per token that the policy may move from one version to the next."""
    entropy: float = Field(0.01, gt=0)
    """Nats per token."""
    growth: float = Field(100.0, gt=1)
    """Factor by which gradient norm or loss exceeds what it was in the run so far."""
    memory_slope: float = Field(1.0, gt=0)
    """Megabytes for 100 steps that the memory of a process grows by, beyond its warm-up and beyond chance, where
    `memory_creeps` warns."""
