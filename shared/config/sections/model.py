"""Which model is trained."""

import re
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from flotilla.shared.config.base.model import Config


class QuantisationConfig(Config):
    """The weights of linear layers in 4 bits each (QLoRA), packed by bitsandbytes when the model is loaded. The output
    layer, embeddings, norms and experts that are one fused weight stay in `model.dtype`."""

    dtype: Literal["nf4", "fp4"]
    """The 16 values of a weight, times the scale of its block of 64: nf4 has them where those of a normal distribution
    are, fp4 where a floating-point number of 4 bits has them."""
    double: bool = True
    """Keep the scales in 8 bits, too: 4.13 bits per weight in all, in place of 4.5."""


class LoraConfig(Config):
    """Low-rank adapters: of a linear layer's weight W, A and B in W + scale * B A are trained, and W stays as it is."""

    rank: int = Field(ge=1)
    """Rows of A and columns of B."""
    alpha: float = Field(16.0, gt=0)
    """The scale is alpha / rank."""
    rank_stabilised: bool = False
    """The scale is alpha / sqrt(rank) instead (rsLoRA)."""
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Linear layers that are adapted, by the last part of their names or more of it, such as `q_proj` or
    `layers.0.self_attn.q_proj`; all-linear: every one but the output layer. Experts that are one fused weight are no
    linear layers."""
    exclude: tuple[str, ...] = ()
    """Layers that are not adapted, named likewise."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of a layer's inputs that its adapter does not see while it is trained. Log-probabilities that are only
    measured, and the rollouts', are without it. What is dropped depends on how a mini-batch is cut: on `ranks` and
    `micro_batch_tokens`."""
    quantisation: QuantisationConfig | None = None
    """Keep the weights beside the adapters in 4 bits each; null keeps them in `model.dtype`. The trainer needs
    bitsandbytes."""

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilised else self.rank)

    @model_validator(mode="after")
    def _names_something(self) -> "LoraConfig":
        if not self.targets:
            raise ValueError("model.lora.targets names no layer: name some, or write all-linear")
        return self


def with_later_keys(stored: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Complete a section that a checkpoint has as JSON: an earlier release knew fewer keys."""
    return None if stored is None else LoraConfig.model_validate(stored).model_dump(mode="json")


FIXED: Mapping[str, str] = {
    "model_type": "it determines the model: choose another path",
    "architectures": "they determine the model: choose another path",
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
    GPUs, else float32. On a CPU bfloat16 halves the memory of weights; it trains faster where the processor multiplies
    it (AVX512_BF16, AMX), and much slower elsewhere."""
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
    vision_tower: Literal["frozen", "trained"] = "frozen"
    """Whether what computes images trains with the rest of a vision-language model, and a critic's with the critic. A
    frozen one computes an image once in a run of the trainer."""
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


class OtherModelConfig(Config):
    """A model beside the one that is trained."""

    path: str = Field(min_length=1)
    """Directory with config.json, safetensors and a tokenizer; or a name on the Hugging Face hub, as `model.path` has
    it."""
    revision: str | None = Field(None, min_length=1)
    """Branch, tag or commit of a hub's model; null is its main branch."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Element type of the weights."""

    @property
    def model(self) -> ModelConfig:
        """The model, as what finds and downloads it reads it."""
        return ModelConfig(path=self.path, revision=self.revision, dtype=self.dtype)

    @model_validator(mode="after")
    def _revision_of_a_hub_name(self) -> Self:
        if self.revision is not None and not is_hub_name(self.path):
            raise ValueError("revision has an effect only where path is a name on the hub, as owner/name: leave it out")
        return self
