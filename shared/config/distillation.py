"""The ``algorithm.distillation`` section: a teacher whose log-probs teach the student token by token."""

from typing import Literal, Self

from pydantic import Field, model_validator

from shared.config.base import Config
from shared.config.model import ModelConfig, is_hub_name


class DistillationConfig(Config):
    """On-policy distillation: each sampled token's advantage gets coefficient * (log p teacher - log p student)."""

    path: str = Field(min_length=1)
    """The teacher: a directory in Hugging Face format, or a name on the hub, as `model.path` has it. Its tokenizer must
    give every token the id that the student's gives it."""
    revision: str | None = Field(None, min_length=1)
    """Branch, tag or commit of a hub's model; null is its main branch."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Element type of the teacher's weights."""
    coefficient: float = Field(1.0, gt=0)
    """Advantage per nat by which the teacher finds a sampled token likelier than the student did."""
    pure: bool = False
    """The teacher alone teaches: advantages of rewards are left out, and `reward` may be."""

    @property
    def model(self) -> ModelConfig:
        """The teacher, as what finds and downloads it reads it."""
        return ModelConfig(path=self.path, revision=self.revision, dtype=self.dtype)

    @model_validator(mode="after")
    def _revision_of_a_hub_name(self) -> Self:
        if self.revision is not None and not is_hub_name(self.path):
            raise ValueError("revision has an effect only where path is a name on the hub, as owner/name: leave it out")
        return self
