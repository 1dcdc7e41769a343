"""How completions are sampled, and by which engine."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from shared.config.base import Config, Device


class SamplingConfig(Config):
    """How the engine samples one completion."""

    temperature: float = Field(1.0, gt=0, le=2)
    """Softmax temperature. Zero (greedy) is not a policy, so it is refused."""
    top_k: int = Field(0, ge=0)
    """Keep this many most likely tokens; 0 keeps all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keep the smallest set of most likely tokens whose probability reaches this."""
    max_new_tokens: int = Field(1024, ge=1)
    """Upper bound on sampled tokens per turn."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Decoded text that ends a completion, besides the model's own end-of-sequence tokens."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence token."""


class TorchEngineConfig(Config):
    """The embedded engine: any Hugging Face causal LM, on CPU or one GPU."""

    kind: Literal["torch"] = "torch"
    slots: int = Field(128, ge=1)
    """Completions sampled at the same time."""
    context_tokens: int = Field(2048, ge=8)
    """Longest prompt and completion together; the KV cache grows up to it."""
    threads: int = Field(1, ge=1)
    """Compute threads of the engine's process."""
    batch_invariant: bool = False
    """Compute each completion in the same shapes whatever else is in the batch, so that its tokens and their
    log-probabilities are the same to the last bit on every rollout and after every restart. Each step then costs what a
    full batch costs: set slots to what is really used. For models that the fused forward runs; others are refused."""
    device: Device = "cpu"
    """Torch device, such as cpu or cuda:0."""


EngineConfig = Annotated[TorchEngineConfig, Field(discriminator="kind")]


class RolloutConfig(Config):
    """How tasks become trajectories."""

    group_size: int = Field(8, ge=1)
    """Trajectories per task."""
    sampling: SamplingConfig = SamplingConfig()
    engine: TorchEngineConfig = TorchEngineConfig()
    task_seconds: float = Field(300.0, gt=0)
    """Longest time that sampling one group may take before it counts as failed."""

    @model_validator(mode="after")
    def _context_holds_a_completion(self) -> "RolloutConfig":
        if self.sampling.max_new_tokens >= self.engine.context_tokens:
            raise ValueError(
                f"rollout.sampling.max_new_tokens {self.sampling.max_new_tokens} leaves no room for a prompt in "
                f"rollout.engine.context_tokens {self.engine.context_tokens}: lower the first or raise the second"
            )
        return self
