"""A reward model: a sequence classifier with one output, which the reward service runs in a process with torch."""

from typing import Literal, Self

from pydantic import Field, model_validator

from flotilla.shared.config.base.model import Config, Device
from flotilla.shared.config.sections.components import ComponentConfig
from flotilla.shared.config.sections.model import OtherModelConfig


class ScoreNormalisation(Config):
    """``(score - mean) / std`` with numbers that are given."""

    mean: float = 0.0
    """Subtracted from the score."""
    std: float = Field(1.0, gt=0)
    """What is left is divided by it."""

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
