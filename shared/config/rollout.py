"""How completions are sampled, and by which engine."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from shared.config.agents import AgentsConfig
from shared.config.base import Config
from shared.config.engine import EngineConfig, TorchEngineConfig
from shared.config.episodes import EpisodesConfig, SingleTurnConfig
from shared.schemas.engine import EngineCapability


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


class RolloutConfig(Config):
    """How tasks become trajectories."""

    group_size: int = Field(8, ge=1)
    """Trajectories per task."""
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = TorchEngineConfig()
    """What samples: without a kind the embedded engine."""
    episodes: EpisodesConfig = SingleTurnConfig()
    """How an episode goes; without one a prompt has one completion."""
    requires: tuple[EngineCapability, ...] = ()
    """What the engine must promise; a spec whose engine does not is refused."""
    agents: AgentsConfig | None = None
    """Agents from outside drive the episodes of training, through the gateway; null: the fleet itself does."""
    task_seconds: float = Field(300.0, gt=0)
    """Longest time that sampling one group may take before it counts as failed."""

    @field_validator("engine", mode="before")
    @classmethod
    def _embedded_unless_said(cls, engine: Any) -> Any:
        return {"kind": "torch", **engine} if isinstance(engine, Mapping) else engine

    @model_validator(mode="after")
    def _engine_promises_what_is_required(self) -> "RolloutConfig":
        for capability in self.requires:
            if capability not in self.engine.CAPABILITIES:
                raise ValueError(
                    f"rollout.requires {capability.value}, which rollout.engine.kind {self.engine.kind} does not "
                    "promise: remove it, or use the embedded engine (kind torch)"
                )
        return self

    @model_validator(mode="after")
    def _log_probs_are_those_to_train_on(self) -> "RolloutConfig":
        sampling = self.sampling
        cuts = sampling.top_k > 0 or sampling.top_p < 1
        if cuts and sampling.temperature != 1 and EngineCapability.UNCUT_LOG_PROBS not in self.engine.CAPABILITIES:
            raise ValueError(
                f"rollout.engine.kind {self.engine.kind} gives log-probabilities either before temperature or after "
                f"top-k and top-p, and training needs those between: with top_k or top_p set rollout.sampling."
                f"temperature to 1, not {sampling.temperature}, or leave both out, or use another engine"
            )
        return self

    @model_validator(mode="after")
    def _context_holds_a_completion(self) -> "RolloutConfig":
        if self.sampling.max_new_tokens >= self.engine.context_tokens:
            raise ValueError(
                f"rollout.sampling.max_new_tokens {self.sampling.max_new_tokens} leaves no room for a prompt in "
                f"rollout.engine.context_tokens {self.engine.context_tokens}: lower the first or raise the second"
            )
        return self
