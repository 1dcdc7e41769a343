"""Models that grade: a reward model, a sequence classifier with one output, and a language model as judge.

The reward service runs them in a process with torch; a judge may also be behind an OpenAI-compatible URL.
"""

import re
from typing import Literal, Self

from pydantic import Field, JsonValue, model_validator

from flotilla.shared.config.base.model import Config, Device
from flotilla.shared.config.sections.components import AnswerPattern, ComponentConfig, GraderUrl
from flotilla.shared.config.sections.model import OtherModelConfig


class ScoreNormalisation(Config):
    """``(score - mean) / std`` with numbers that are given."""

    mean: float = 0.0
    """Subtracted from the score."""
    std: float = Field(1.0, gt=0)
    """The difference is divided by it."""

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if self.mean == 0 and self.std == 1:
            raise ValueError("normalise with mean 0 and std 1 changes no score: give others, or leave it out")
        return self


class HostedModelConfig(ComponentConfig, OtherModelConfig):
    """A component whose model the reward service runs in a process with torch."""

    device: Device = "cpu"
    """Torch device of the model, such as cpu or cuda:0; it must be one of the reward service's machine."""
    threads: int = Field(1, ge=1)
    """Compute threads of the model's process."""
    batch_samples: int = Field(32, ge=1)
    """Most samples that the process has at a time, of whatever groups."""
    batch_tokens: int = Field(16384, ge=2)
    """Most tokens of one forward pass, padding included; one sample may have more."""
    timeout_seconds: float = Field(300.0, gt=0, le=3600)
    """Time for one batch; a process that takes longer is started again."""


class RewardModelConfig(HostedModelConfig):
    """The score that a sequence classifier with one output gives the answer: a reward model, such as the checkpoint of
    a job of kind `reward_model`."""

    kind: Literal["reward_model"] = "reward_model"
    reads: Literal["messages", "text"] = "messages"
    """messages: the conversation, rendered by the reward model's own chat template; a prompt without messages counts as
    text. text: prompt and response as the policy had them, then the end-of-sequence token (OpenRLHF)."""
    template: str | None = Field(None, min_length=1)
    """Chat template (Jinja) instead of that of the model's tokenizer."""
    max_tokens: int = Field(2048, ge=2)
    """Longest prompt and response together."""
    overlong: Literal["error", "truncate"] = "error"
    """error: a longer sample is an error; truncate: it loses its first tokens."""
    normalise: Literal["stored"] | ScoreNormalisation | None = None
    """stored: by `mean` and `std` of the model's config.json, where OpenRLHF writes them; or by two numbers; null: by
    none."""

    @model_validator(mode="after")
    def _means_something(self) -> Self:
        if self.template is not None and self.reads == "text":
            raise ValueError("template has no effect with `reads: text`, which takes the policy's text: drop one")
        return self


PLACES = ("prompt", "response", "label")
DEFAULT_TEMPLATE = """\
A question was answered. Judge how good the answer is.

Question:
{prompt}

Answer:
{response}

Think it over briefly, then end with one line: Score: N, where N is a whole number from 0 (useless) to 10 (perfect)."""


class QuestionConfig(ComponentConfig):
    """What a judge is asked, and how its reply is read."""

    template: str = DEFAULT_TEMPLATE
    """What the judge is asked; ``{prompt}``, ``{response}`` and ``{label}`` are put in."""
    pattern: AnswerPattern = r"(?i)score\W{0,5}(-?\d+(?:\.\d+)?)"
    """Finds the verdict in the judge's reply; the last match counts."""
    verdicts: dict[str, float] | None = None
    """Rewards by verdict, compared without case, such as ``{yes: 1, no: 0}``. Null: the verdict is a number."""
    low: float = 0.0
    """The number that means a reward of 0."""
    high: float = 10.0
    """The number that means a reward of 1; numbers outside of both are no verdict."""

    @model_validator(mode="after")
    def _means_something(self) -> Self:
        if "{response}" not in self.template:
            raise ValueError("template has no {response}, so that all samples would be judged alike: put it in")
        if self.low >= self.high:
            raise ValueError(f"low {self.low:g} must be below high {self.high:g}")
        if self.verdicts is not None and not self.verdicts:
            raise ValueError("verdicts has no entry: name at least two, or leave it out to read numbers")
        return self


class JudgeConfig(QuestionConfig):
    """A language model's verdict on the response, asked once or several times."""

    kind: Literal["judge"] = "judge"
    url: GraderUrl
    """Base URL of an OpenAI-compatible server, such as ``https://api.example.com/v1``."""
    model: str = Field(min_length=1)
    """Name of the model."""
    api_key_env: str | None = Field(None, min_length=1)
    """Name of the reward service's environment variable that holds the API key. Null: none is sent."""
    system: str | None = None
    """System message. Null: none."""
    votes: int = Field(1, ge=1, le=64)
    """How often the judge is asked about each sample."""
    aggregate: Literal["mean", "median", "majority"] = "mean"
    """What is made of the votes."""
    temperature: float = Field(0.0, ge=0, le=2)
    """Of the judge's sampling; several votes at 0 are mostly the same."""
    max_tokens: int = Field(512, ge=1)
    """Most tokens of a reply."""
    concurrency: int = Field(32, ge=1, le=1024)
    """Requests that one reward service has with the judge at a time."""
    deadline_seconds: float = Field(120.0, gt=0, le=86400)
    """Time for one vote with all its retries."""
    attempt_seconds: float = Field(60.0, gt=0, le=86400)
    """Time for one attempt."""
    max_attempts: int = Field(4, ge=1, le=100)
    """Attempts within the deadline."""
    dollars_per_million_prompt_tokens: float = Field(0.0, ge=0)
    """Price, for the metric ``cost_dollars``."""
    dollars_per_million_completion_tokens: float = Field(0.0, ge=0)
    """Price, for the metric ``cost_dollars``."""
    allow_private: bool = False
    """As for a remote grader."""

    @model_validator(mode="after")
    def _votes_are_counted(self) -> Self:
        if self.votes == 1 and self.aggregate != "mean":
            raise ValueError(f"aggregate {self.aggregate} has no effect with one vote: raise votes, or leave it out")
        return self


class JudgeModelConfig(QuestionConfig, HostedModelConfig):
    """The verdict of a causal language model that the reward service runs itself."""

    kind: Literal["judge_model"] = "judge_model"
    chat_template_options: dict[str, JsonValue] = Field(default_factory=dict)
    """Variables of the judge's chat template, such as `enable_thinking: false`."""
    temperature: float = Field(0.0, ge=0, le=2)
    """Of the judge's sampling; 0 takes the likeliest token."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keep the smallest set of most likely tokens whose probability reaches this."""
    top_k: int = Field(0, ge=0)
    """Keep this many most likely tokens; 0 keeps all."""
    max_new_tokens: int = Field(512, ge=1)
    """Most tokens of a reply."""
    max_tokens: int = Field(8192, ge=2)
    """Longest question; a sample that makes a longer one is an error."""

    @model_validator(mode="after")
    def _greedy_samples_nothing(self) -> Self:
        if self.temperature == 0 and (self.top_p < 1 or self.top_k > 0):
            raise ValueError("top_p and top_k have no effect at temperature 0, which is greedy: leave them out")
        return self


PLACE = re.compile(r"\{(" + "|".join(PLACES) + r")\}")
