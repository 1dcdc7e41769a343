"""Which model is trained."""

import re
from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from flotilla.shared.config.base.model import Config
from flotilla.shared.config.sections.lora import LoraConfig, QuantisationConfig

FIXED: Mapping[str, str] = {
    "model_type": "it says which model it is: choose another path",
    "architectures": "they say which model it is: choose another path",
    "auto_map": "code from a model directory is never run",
    "quantization_config": "weights are packed by model.lora.quantisation",
    "dtype": "set model.dtype",
    "torch_dtype": "set model.dtype",
    "attn_implementation": "set model.attention",
}
"""Keys of a model's config that no override may set, and what to do instead."""
DROPOUT = re.compile(r"drop(out|path)?(_|$)|_pdrop$|(^|_)drop_")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_name(path: str) -> bool:
    """Whether a path has the form of a name on the Hugging Face hub: OWNER/NAME."""
    return HUB_NAME.fullmatch(path) is not None


class ModelConfig(Config):
    """A causal language model in Hugging Face format."""

    path: str = Field(min_length=1)
    """Directory with config.json, safetensors and a tokenizer; or a name on the Hugging Face hub, such as
    `Qwen/Qwen3-0.6B`, which each service that loads it downloads when it starts. A relative path is taken from the spec
    file's folder: OWNER/NAME is a hub name where that folder has no OWNER."""
    revision: str | None = Field(None, min_length=1)
    """Branch, tag or commit of a hub's model; null is its main branch. The gateway replaces it by the commit that it is
    when the experiment is created."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Element type of the weights in training and sampling. auto: bfloat16 where all that compute with them do so on
    GPUs, else float32: on a CPU without AMX, bfloat16 is much slower."""
    overrides: Mapping[str, JsonValue] = Field(default={})
    """Values that take the place of those in the model's config.json, for trainer, engines and checkpoints, such as
    `{max_position_embeddings: 32768}`; a mapping changes the keys below it alone. A key that the model's kind does not
    know is refused when the model is loaded."""
    attention: Literal[
        "auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention"
    ] = "auto"
    """What computes attention in the trainer, by transformers' names. auto: torch's sdpa where the model has it, else
    eager. What is not installed there, or what the model does not support, is refused when the model is loaded."""
    kernels: Literal["auto", "liger"] = "auto"
    """What computes norms, gates and rotations in the trainer. liger: Liger's Triton kernels, on a GPU, where that
    package is installed. auto: ours on a CPU, torch's elsewhere."""
    lora: LoraConfig | None = None
    """Adapters that are trained in place of the weights; null trains the weights themselves. See docs/lora.md."""

    @property
    def quantisation(self) -> QuantisationConfig | None:
        """How the weights beside adapters are packed; None where they are whole."""
        return None if self.lora is None else self.lora.quantisation

    @property
    def is_hub_name(self) -> bool:
        """Whether the path names a model on the hub."""
        return is_hub_name(self.path)

    @field_validator("overrides")
    @classmethod
    def _overrides_are_of_the_config(cls, overrides: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
        for key, value in overrides.items():
            if (instead := FIXED.get(key.lstrip("_"))) is not None:
                raise ValueError(f"{key!r} may not be given: {instead}")
            if DROPOUT.search(key) and value:
                raise ValueError(
                    f"{key!r} may not be given: a policy is trained without dropout, so that it computes what the "
                    "engine sampled from"
                )
        return overrides

    @model_validator(mode="after")
    def _revision_of_a_hub_name(self) -> Self:
        if self.revision is not None and not self.is_hub_name:
            raise ValueError("revision has an effect only where path is a name on the hub, as owner/name: leave it out")
        return self
