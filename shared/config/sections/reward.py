"""How answers are graded: one or several components, whose weighted sum is the reward.

Addresses of our own services and all secrets come from the reward service's settings, not from here. The URL of a
remote grader is part of the experiment: it defines what is optimised.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from flotilla.shared.config.base.model import Config
from flotilla.shared.config.code_reference import CodeReference
from flotilla.shared.config.sections.components import AnswerPattern, ComponentConfig, GraderUrl, RegularExpression
from flotilla.shared.config.sections.judge import (
    HostedModelConfig,
    JudgeConfig,
    JudgeModelConfig,
    QuestionConfig,
    RewardModelConfig,
)
from flotilla.shared.config.sections.model import ModelConfig
from flotilla.shared.config.sections.shaping import GroupFilterConfig, SampleMaskConfig, ShapingConfig


class MatchConfig(ComponentConfig):
    """A component that compares the answer with the label."""

    correct: float = 1.0
    """Reward of a right answer."""
    incorrect: float = 0.0
    """Reward of a wrong answer, or of none."""

    @model_validator(mode="after")
    def _tells_right_from_wrong(self) -> Self:
        if self.correct == self.incorrect:
            raise ValueError(
                f"correct and incorrect are both {self.correct:g}, so that all answers are alike: give two values"
            )
        return self


class ExactConfig(MatchConfig):
    """The answer equals the label as text."""

    kind: Literal["exact"] = "exact"
    pattern: AnswerPattern | None = None
    """Finds the answer in the response. Null: the whole response is the answer."""
    ignore_case: bool = False
    """Compare without regard to case."""


class NumericConfig(MatchConfig):
    """The answer equals the label as a number."""

    kind: Literal["numeric"] = "numeric"
    pattern: AnswerPattern = r"####\s*([-+]?\$?\s?[\d.,]*\d(?:[eE][-+]?\d+)?)"
    """Finds the number in the response, and in the label if it matches there. The default finds ``#### 1,234.5``."""
    tolerance: float = Field(0.0, ge=0)
    """Largest absolute difference that still counts as equal."""


class ComparedConfig(MatchConfig):
    """A component that compares in processes that can be killed."""

    timeout_seconds: float = Field(10.0, gt=0, le=300)
    """Time for one sample; a sample that takes longer is an error, never a wrong answer."""
    processes: int = Field(1, ge=1, le=64)
    """How many samples are compared at a time, each in a process of its own."""


class MathConfig(ComparedConfig):
    """The answer is mathematically equal to the label, by math-verify in a process that can be killed."""

    kind: Literal["math"] = "math"


class RegexConfig(ComparedConfig):
    """The response matches a regular expression of Python's, in a process that can be killed."""

    kind: Literal["regex"] = "regex"
    pattern: RegularExpression | None = None
    """What the response must match. Null: the label is the pattern."""
    whole: bool = False
    """Match the whole response, white space at both ends removed; false: any part of it."""
    ignore_case: bool = False
    """Match without regard to case."""


class JsonSchemaConfig(ComparedConfig):
    """The response is JSON that a schema allows, by jsonschema in a process that can be killed."""

    kind: Literal["json_schema"] = "json_schema"
    json_schema: dict[str, JsonValue] | None = None
    """The schema (2020-12, or the draft that its `$schema` names). Null: the label is the schema."""


class ChoiceConfig(MatchConfig):
    """The answer is the letter of the right choice."""

    kind: Literal["choice"] = "choice"
    letters: str = Field("ABCD", pattern=r"^[A-Z]{2,26}$")
    """Letters that there are to choose from."""
    pattern: AnswerPattern | None = None
    """Finds the letter in the response. Null: the last one in `\\boxed{}`, at the start of `<answer>`, or after the
    word answer, choice or option; without any, the letter with which the response begins, as in `(B)` or `B. Paris`."""


TagName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")]


class FormatConfig(MatchConfig):
    """The response is written between tags: each once, in their order, none empty. Needs no label."""

    kind: Literal["format"] = "format"
    tags: tuple[TagName, ...] = Field(("think", "answer"), min_length=1)
    """Names of the tags. The first may be opened by the prompt's end already."""
    allow_text_outside: bool = False
    """Allow more than white space before, between and after the tags."""

    @model_validator(mode="after")
    def _tags_differ(self) -> Self:
        if len(set(self.tags)) < len(self.tags):
            raise ValueError(f"tags names one twice, and each is asked for once: {', '.join(self.tags)}")
        return self


class IfevalConfig(MatchConfig):
    """The response follows the instruction in the label, such as `{"func_name": "verify_bullet_points", "N": 3}`."""

    kind: Literal["ifeval"] = "ifeval"
    repetition_penalty: float = Field(0.0, ge=0)
    """Taken off a response that only repeats itself; of others in proportion to their repeated runs of three words."""


class CustomConfig(ComponentConfig):
    """A function of the user's, plain or async: ``function(sample)`` returns a number, None (abstain) or a Grade."""

    kind: Literal["custom"] = "custom"
    path: CodeReference
    """``file.py:function``, or ``package.module:function`` of a package in the spec file's folder; both import what is
    beside them."""
    timeout_seconds: float = Field(60.0, gt=0, le=3600)
    """Time for one sample; a sample that takes longer is an error."""


class CodeConfig(ComponentConfig):
    """The program in the response passes the test cases in the label, run by the sandbox."""

    kind: Literal["code"] = "code"
    language: str = "python"
    """Language of the program, one that the sandbox offers."""
    reward: Literal["fraction", "all"] = "fraction"
    """fraction: share of the test cases that pass; all: 1 if every one passes, else 0."""
    max_cases: int | None = Field(None, ge=1)
    """Run only the first cases. Null: all."""
    compile_timeout_seconds: float = Field(10.0, gt=0, le=300)
    """Time to compile."""
    run_timeout_seconds: float = Field(10.0, gt=0, le=300)
    """Time for one test case."""
    concurrency: int = Field(8, ge=1, le=1024)
    """How many test cases are with the sandbox at a time."""
    image_column: str | None = Field(None, min_length=1)
    """Column of the rows with the image that each task's programs run in; the sandbox must have a provider of boxes.
    Null: what the sandbox has set."""


class VerlDefaultConfig(ComponentConfig):
    """verl's own scorers, chosen by the row's data source: gsm8k, MATH, math_dapo, geometry3k, search, programs."""

    kind: Literal["verl_default"] = "verl_default"
    runs_code: bool = False
    """Grade programs (codecontests, apps, codeforces, taco), which needs a sandbox. False: they are refused."""


class ConstantConfig(ComponentConfig):
    """The same reward for every answer: for what is learned without one, as from a teacher alone."""

    kind: Literal["constant"] = "constant"
    value: float = 0.0
    """The reward."""


class RecordedRewardConfig(ComponentConfig):
    """The reward that an earlier run gave for the same answer to the same prompt: a mock grader."""

    kind: Literal["recorded"] = "recorded"
    dump: str = Field(min_length=1)
    """Whose rewards: the directory of a run or of an experiment, its folder `samples`, or one file of it. Trained
    samples have the rewards that the trainer saw, `reward.shaping` included."""
    others: Literal["error", "drawn"] = "error"
    """What becomes of an answer that the dump does not have. error: it has no reward, and the group counts it as a
    failed grade; drawn: it has the reward of another one, chosen by the sample's id."""
    seconds: float = Field(0.0, ge=0, le=600)
    """Time that grading a group takes, at least."""


class EnvironmentRewardConfig(ComponentConfig):
    """What the environment gave: the sum of its rewards over the turns of the episode."""

    kind: Literal["environment"] = "environment"


class AgentRewardConfig(ComponentConfig):
    """The reward that the agent reports, at the episode's end or later."""

    kind: Literal["agent"] = "agent"
    window_seconds: float = Field(0.0, ge=0, le=2_592_000)
    """How long after the end of an episode its reward is waited for. An episode without one is left out of training."""


class GraderReplica(Config):
    """One of several URLs of the same grader."""

    url: GraderUrl
    """Where samples are posted."""
    weight: float = Field(1.0, gt=0)
    """How often it is asked, relative to the others."""


class RemoteConfig(ComponentConfig):
    """A grader behind a URL, in any language, operated by anyone."""

    kind: Literal["remote"] = "remote"
    url: GraderUrl | None = None
    """Where the samples are posted."""
    urls: tuple[GraderReplica, ...] = ()
    """Instead of ``url``: several servers of the same grader. Each request goes to one of them by weight; one that
    fails is passed over to another."""
    concurrency: int = Field(64, ge=1, le=1024)
    """Requests that one reward service has with the grader at a time; further ones wait, outside of their deadline."""
    breaker_failures: int = Field(5, ge=1)
    """A URL that fails so often in a row, or answers nothing that can be used, is left alone for a while."""
    breaker_seconds: float = Field(5.0, gt=0, le=60)
    """For how long at first; it doubles up to a minute while the one request that tries it then fails, too."""
    dialect: Literal["flotilla", "openrlhf"] = "flotilla"
    """flotilla: the schema in ``shared/schemas/grading.py``; openrlhf: ``query``, ``prompts``, ``labels``, answered by
    ``rewards``."""
    secret_env: str | None = Field(None, min_length=1)
    """Name of the reward service's environment variable that holds the signing secret. Null: not signed."""
    deadline_seconds: float = Field(120.0, gt=0, le=86400)
    """Time for one request with all its retries."""
    attempt_seconds: float = Field(60.0, gt=0, le=86400)
    """Time for one attempt."""
    max_attempts: int = Field(4, ge=1, le=100)
    """Attempts within the deadline."""
    callback_seconds: float | None = Field(None, gt=0, le=2_592_000)
    """Offer a callback: a grader that answers 202 posts grades within this time. Null: they are expected at once."""
    allow_private: bool = False
    """Allow a URL that resolves to an address that is not public, if the operator of the reward service has named its
    network (``FLOTILLA_GRADER_NETWORKS``; loopback where nothing is set)."""

    @model_validator(mode="after")
    def _has_urls(self) -> Self:
        if (self.url is None) == (not self.urls):
            raise ValueError("a remote grader has either `url`, or several `urls`: give one of the two")
        given = [each.url for each in self.urls]
        if len(set(given)) < len(given):
            raise ValueError("a URL is named twice in `urls`: give it once, with the sum of the weights")
        if self.callback_seconds is not None and self.dialect == "openrlhf":
            raise ValueError("callback_seconds has no effect with dialect openrlhf, which knows no callbacks: drop one")
        return self

    @property
    def weighted_urls(self) -> tuple[tuple[str, float], ...]:
        """Every URL with its weight."""
        return tuple((each.url, each.weight) for each in self.urls) or ((self.url or "", 1.0),)


Component = Annotated[
    ExactConfig
    | NumericConfig
    | MathConfig
    | RegexConfig
    | JsonSchemaConfig
    | ChoiceConfig
    | FormatConfig
    | IfevalConfig
    | CustomConfig
    | CodeConfig
    | VerlDefaultConfig
    | EnvironmentRewardConfig
    | ConstantConfig
    | RecordedRewardConfig
    | AgentRewardConfig
    | JudgeConfig
    | JudgeModelConfig
    | RewardModelConfig
    | RemoteConfig,
    Field(discriminator="kind"),
]


def may_read_label(component: ComponentConfig) -> bool:
    """Return whether a component's grade may depend on the label of the row."""
    match component:
        case RegexConfig():
            return component.pattern is None
        case JsonSchemaConfig():
            return component.json_schema is None
        case QuestionConfig():
            return "{label}" in component.template
        case AgentRewardConfig() | ConstantConfig() | EnvironmentRewardConfig() | FormatConfig() | RewardModelConfig():
            return False
        case RecordedRewardConfig():
            return False
    return True


class AuditConfig(Config):
    """A second grade that the policy never sees: of a share of the groups, by graders that are no part of the reward.

    Where the two disagree more than a bound allows, and not by chance, the reward is being gamed, or one of the graders
    is wrong: the experiment is paused, with examples.
    """

    components: tuple[Component, ...] = Field(min_length=1)
    """What grades a second time, as `reward.components` does the first; not of kind agent, which grades once."""
    share: float = Field(0.1, gt=0, le=1)
    """Of the groups in training, chosen by their ids."""
    tolerance: float = Field(1e-6, ge=0)
    """Two grades of a sample disagree where they differ by more."""
    bound: float = Field(0.1, ge=0, lt=1)
    """Share of the samples that may disagree."""
    confidence: float = Field(0.95, ge=0.5, lt=1)
    """How sure it must be that more than that do, groups being the independent draws."""
    min_groups: int = Field(8, ge=2)
    """Audited groups before anything is concluded."""
    window: int = Field(64, ge=2)
    """Newest audited groups that are examined."""
    deadline_seconds: float = Field(60.0, gt=0, le=86_400)
    """Time for the second grade of a group, which waits for it. After it the grade counts as failed."""
    pause: bool = True
    """Pause the experiment. False: the finding alone."""

    @model_validator(mode="after")
    def _window_holds_enough(self) -> Self:
        if self.window < self.min_groups:
            raise ValueError(
                f"audit.window {self.window} is less than audit.min_groups {self.min_groups}, so that nothing is ever "
                "be concluded: raise the first or lower the second"
            )
        if any(isinstance(each, AgentRewardConfig) for each in self.components):
            raise ValueError("audit.components: a reward of kind agent is given once, and cannot be asked for again")
        return self


class RewardConfig(Config):
    """The reward of a sample: ``sum(weight * reward)`` over the components that scored it."""

    components: tuple[Component, ...] = Field((NumericConfig(),), min_length=1)
    """What is graded. One that abstains adds nothing; if all abstain the sample is abstained; if one fails it is an
    error."""
    filter_zero_spread: bool = False
    """Filter groups whose rewards are all equal, since they teach a group-relative method nothing; the feeder issues
    others in their place (DAPO's dynamic sampling)."""
    group_filter: GroupFilterConfig | None = None
    """Which groups are trained on, judged by the rewards as graded; null keeps all."""
    sample_mask: SampleMaskConfig | None = None
    """Which trajectories enter the loss, judged by the rewards as graded; the others still count in their group's
    statistics. Null: all."""
    shaping: ShapingConfig | None = None
    """What happens to a reward between the graders and the trainer, except in evaluation; null: nothing."""
    audit: AuditConfig | None = None
    """A hidden second grade of a share of the groups, which notices a reward that is gamed; null: none."""
    max_consecutive_failures: int = Field(32, ge=1)
    """The experiment fails, with the words of the last error, when this many groups in a row could not be graded, or
    this many tasks in a row could not be answered at all (prompts that do not fit, say)."""

    @property
    def graders(self) -> dict[str, Component]:
        """Everything that grades, by the path of its section: the components, and those of the audit."""
        found = {f"reward.components.{number}": each for number, each in enumerate(self.components)}
        audited = () if self.audit is None else self.audit.components
        return found | {f"reward.audit.components.{number}": each for number, each in enumerate(audited)}

    @property
    def hosted_models(self) -> tuple[ModelConfig, ...]:
        """Models that reward services load to grade."""
        return tuple(each.model for each in self.graders.values() if isinstance(each, HostedModelConfig))

    @property
    def may_read_labels(self) -> bool:
        """Whether a grade may depend on the label of the row."""
        return any(may_read_label(each) for each in self.graders.values())

    @property
    def waits_for_answers(self) -> bool:
        """Whether grades may come long after they are asked for."""
        return any(
            each.window_seconds > 0 if isinstance(each, AgentRewardConfig) else each.callback_seconds is not None
            for each in self.components
            if isinstance(each, AgentRewardConfig | RemoteConfig)
        )

    @model_validator(mode="after")
    def _one_filter(self) -> Self:
        if self.filter_zero_spread and self.group_filter is not None:
            raise ValueError(
                "reward.filter_zero_spread and reward.group_filter both choose the groups to train on: keep one "
                "(filter_zero_spread is group_filter: {kind: spread_above})"
            )
        return self

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        for components in (self.components, () if self.audit is None else self.audit.components):
            names = [component.name or component.kind for component in components]
            for name in names:
                if names.count(name) > 1:
                    raise ValueError(f"two components are called {name!r}; give one of them another `name`")
        return self

    @model_validator(mode="after")
    def _metric_has_a_component(self) -> Self:
        metric = self.group_filter.metric if self.group_filter is not None else None
        names = [component.name or component.kind for component in self.components]
        if metric is not None and metric.partition("/")[0] not in names:
            raise ValueError(
                f"group_filter.metric {metric!r} is of no component: write COMPONENT/METRIC, with a component of "
                f"{', '.join(names)}, or null to judge the reward"
            )
        return self
