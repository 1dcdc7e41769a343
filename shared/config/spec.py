"""The experiment spec: one strict tree, validated where there is no torch."""

from typing import Self

from pydantic import Field, model_validator

from shared.config.algorithm import AlgorithmConfig
from shared.config.asynchrony import AsynchronyConfig
from shared.config.base import Config
from shared.config.checkpoint import CheckpointConfig
from shared.config.cross_section_rules import check_sections
from shared.config.data import DataConfig
from shared.config.evaluation import EvaluationConfig
from shared.config.health import HealthConfig
from shared.config.model import ModelConfig
from shared.config.optimisation import OptimisationConfig
from shared.config.parallelism import ParallelismConfig
from shared.config.publication import TransportChoice
from shared.config.resources import ResourcesConfig
from shared.config.reward import CodeConfig, EnvironmentRewardConfig, RewardConfig, VerlDefaultConfig
from shared.config.rollout import RolloutConfig
from shared.config.samples import SamplesConfig
from shared.config.tracking import TrackingConfig


class ExperimentSpec(Config):
    """All that defines an experiment."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    """Letters, digits, dot, dash and underscore; names the run's folder."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seeds the order of rows and every sample."""
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimisation: OptimisationConfig
    asynchrony: AsynchronyConfig = AsynchronyConfig()
    parallelism: ParallelismConfig = ParallelismConfig()
    evaluation: EvaluationConfig | None = None
    """Null: never evaluated."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    samples: SamplesConfig | None = SamplesConfig()
    """Null: nothing that the model wrote is kept."""
    tracking: TrackingConfig = TrackingConfig()
    health: HealthConfig = HealthConfig()
    resources: ResourcesConfig = ResourcesConfig()

    @property
    def runs_code(self) -> bool:
        """Whether a reward component needs a sandbox."""
        return any(
            component.runs_code if isinstance(component, VerlDefaultConfig) else isinstance(component, CodeConfig)
            for component in self.reward.components
        )

    @property
    def environment_weight(self) -> float:
        """Factor of the environment's own rewards in the reward; 0 where they are not part of it."""
        return sum(each.weight for each in self.reward.components if isinstance(each, EnvironmentRewardConfig))

    @property
    def groups_per_step(self) -> int:
        """R: the groups that one step trains."""
        return self.optimisation.groups_per_mini_batch * self.asynchrony.require_batches

    @property
    def admission_budget(self) -> int:
        """Groups that may be outstanding or consumed since the last publication."""
        return self.asynchrony.budget(self.groups_per_step)

    @property
    def is_on_gpus(self) -> bool:
        """Whether trainer and engines compute on GPUs."""
        return self.parallelism.device.startswith("cuda") and self.rollout.engine.device.startswith("cuda")

    @property
    def uses_nccl(self) -> bool:
        """Whether broadcasts of weights go through nccl; else they go through gloo."""
        choice = self.asynchrony.publication.transport
        return choice is TransportChoice.NCCL or (choice is TransportChoice.AUTO and self.is_on_gpus)

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt in tokens."""
        return self.data.max_prompt_tokens or self.room_for_a_prompt

    @property
    def room_for_a_prompt(self) -> int:
        """Tokens of the engine's context that no answer may take."""
        sampled = max(self.rollout.sampling.max_new_tokens, (self.evaluation and self.evaluation.max_new_tokens) or 0)
        return self.rollout.engine.context_tokens - sampled

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        check_sections(self)
        return self
