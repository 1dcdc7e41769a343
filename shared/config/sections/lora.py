"""The ``model.lora`` section: which adapters are trained in place of the weights."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

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
