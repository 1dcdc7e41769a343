"""How completions are sampled, and by which engine."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from flotilla.shared.config.base.model import Config
from flotilla.shared.config.sections.agents import AgentsConfig
from flotilla.shared.config.sections.engine import EngineConfig, TorchEngineConfig
from flotilla.shared.config.sections.episodes import EpisodesConfig, SingleTurnConfig
from flotilla.shared.schemas.engine import EngineCapability

_PENALISED = "SGLang's log-probabilities are of the penalised distribution, which the trainer does not compute again"
_RESUMED = "vLLM counts what an interrupted completion had as prompt, so that the penalty would begin anew"
UNUSED_PENALTIES: Mapping[str, Mapping[str, str]] = {
    "sglang": dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), _PENALISED),
    "vllm": dict.fromkeys(("presence_penalty", "frequency_penalty"), _RESUMED),
}
"""Penalties that an engine has under these names and does not mean as the embedded one does, and why not."""


class SamplingConfig(Config):
    """How the engine samples one completion."""

    temperature: float = Field(1.0, gt=0, le=2)
    """Softmax temperature. Zero (greedy) is not a policy, so it is refused."""
    top_k: int = Field(0, ge=0)
    """Keep this many most likely tokens; 0 keeps all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keep the smallest set of most likely tokens whose probability reaches this."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Keep the tokens that are at least this part as likely as the most likely one; 0 keeps all."""
    repetition_penalty: float = Field(1.0, gt=0, le=2)
    """Divide the logits of tokens that prompt or completion have already (multiply negative ones); 1 changes none."""
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    """Take this off the logits of tokens that the turn has sampled already."""
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    """The same, as often as they were sampled."""
    max_new_tokens: int = Field(1024, ge=1)
    """Upper bound on sampled tokens per turn."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Decoded text that ends a completion, besides the model's own end-of-sequence tokens."""
    ignore_eos: bool = False
    """Continue after the model's end-of-sequence token."""

    @property
    def rarer(self) -> dict[str, float]:
        """What else decides which token is sampled, and changes no log-probability."""
        return {"min_p": self.min_p, "repetition_penalty": self.repetition_penalty, **self._of_completion}

    @property
    def _of_completion(self) -> dict[str, float]:
        return {"presence_penalty": self.presence_penalty, "frequency_penalty": self.frequency_penalty}

    @property
    def penalties(self) -> list[str]:
        """Name the penalties that are set."""
        of_repetition = ["repetition_penalty"] if self.repetition_penalty != 1 else []
        return of_repetition + [name for name, value in self._of_completion.items() if value != 0]

    @property
    def is_cut(self) -> bool:
        """Whether tokens are sampled from another distribution than the softmax by temperature."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or bool(self.penalties)


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
    """Agents drive the episodes of training, through the gateway; null: the fleet itself does."""
    task_seconds: float = Field(300.0, gt=0)
    """Longest time that sampling one group may take before it counts as failed."""

    @property
    def starts_agents(self) -> bool:
        """Whether rollouts start the agents that drive the episodes."""
        return self.agents is not None and self.agents.environment is not None

    @property
    def records_the_cut(self) -> bool:
        """Whether log-probabilities are recorded of what is sampled from, after cuts and penalties, not of the policy.

        An engine that lacks ``uncut_log_probs`` has no others at a temperature other than 1.
        """
        is_uncut = EngineCapability.UNCUT_LOG_PROBS in self.engine.CAPABILITIES
        return self.sampling.is_cut and self.sampling.temperature != 1 and not is_uncut

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
    def _penalties_are_those_of_the_engine(self) -> "RolloutConfig":
        why = UNUSED_PENALTIES.get(self.engine.kind, {})
        for name in self.sampling.penalties:
            if name in why:
                raise ValueError(f"rollout.sampling.{name}: {why[name]}; remove it, or use the embedded engine")
        return self

    @model_validator(mode="after")
    def _context_holds_a_completion(self) -> "RolloutConfig":
        if self.sampling.max_new_tokens >= self.engine.context_tokens:
            raise ValueError(
                f"rollout.sampling.max_new_tokens {self.sampling.max_new_tokens} leaves no room for a prompt in "
                f"rollout.engine.context_tokens {self.engine.context_tokens}: lower the first or raise the second"
            )
        return self
