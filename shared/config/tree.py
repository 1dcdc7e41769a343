"""The tree of sections that a spec is, and what follows from it; the rules that look across sections read this."""

from typing import Literal

from pydantic import Field

from flotilla.shared.config.base.model import Config
from flotilla.shared.config.sections.algorithm import AlgorithmConfig
from flotilla.shared.config.sections.asynchrony import AsynchronyConfig
from flotilla.shared.config.sections.checkpoint import CheckpointConfig
from flotilla.shared.config.sections.data import DataConfig
from flotilla.shared.config.sections.engine import SglangEngineConfig
from flotilla.shared.config.sections.episodes import ToolEpisodesConfig
from flotilla.shared.config.sections.evaluation import EvaluationConfig
from flotilla.shared.config.sections.health import HealthConfig
from flotilla.shared.config.sections.job import (
    EvaluationJobConfig,
    FinishedJob,
    JobConfig,
    KtoConfig,
    PreferenceConfig,
    ReinforcementConfig,
)
from flotilla.shared.config.sections.model import ModelConfig
from flotilla.shared.config.sections.optimisation import OptimisationConfig
from flotilla.shared.config.sections.parallelism import ParallelismConfig
from flotilla.shared.config.sections.publication import ENGINE_BUCKET_MEGABYTES, TransportChoice
from flotilla.shared.config.sections.resources import ResourcesConfig
from flotilla.shared.config.sections.reward import CodeConfig, EnvironmentRewardConfig, RewardConfig, VerlDefaultConfig
from flotilla.shared.config.sections.rollout import RolloutConfig
from flotilla.shared.config.sections.rule import MOST_RULES, RuleConfig
from flotilla.shared.config.sections.tracking import SamplesConfig, TrackingConfig

STEPS_AHEAD = 4
"""Steps whose groups wait for the trainer where they need not be sampled."""


class Sections(Config):
    """What an experiment is defined by, without the rules across sections."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    """Letters, digits, dot, dash and underscore; names the run's folder."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seeds the order of rows and every sample."""
    job: JobConfig = ReinforcementConfig()
    """What is done with the rows; without a kind reinforcement learning."""
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig
    """How answers are graded; only where some are sampled."""
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
    exactness: Literal["bitwise"] | None = None
    """bitwise: the log-probabilities of sampled tokens that the embedded engine reports and those that the trainer
    computes of the same weights are equal to the last bit, so that an on-policy ratio is exactly 1. For debugging:
    sampling and training take several times as long. On a CPU, with one rank, the same number of threads on both sides,
    and `asynchrony.staleness_threshold` 0. Null: they differ by rounding."""
    rules: tuple[RuleConfig, ...] = Field((), max_length=MOST_RULES)
    """What the gateway does by itself once a series of the run behaves as a rule says."""
    resources: ResourcesConfig = ResourcesConfig()

    @property
    def finished_job(self) -> FinishedJob | None:
        """The job, where its rows hold finished answers; None where rollouts answer them."""
        return None if isinstance(self.job, ReinforcementConfig | EvaluationJobConfig) else self.job

    @property
    def trains(self) -> bool:
        """Whether there is a trainer; else an evaluation is all that is done."""
        return not isinstance(self.job, EvaluationJobConfig)

    @property
    def _is_sampled(self) -> bool:
        """Whether what is trained is sampled and graded for it; else rows hold answers, or others sample groups."""
        return self.finished_job is None and not self.data.holds_groups

    @property
    def samples_answers(self) -> bool:
        """Whether rollouts and rewards are needed: for training, or for evaluations alone."""
        return self._is_sampled or self.evaluation is not None

    @property
    def written_answers(self) -> str | None:
        """The column whose answers are graded in place of a rollout's; None where rollouts answer."""
        return self.job.response_column if isinstance(self.job, EvaluationJobConfig) else None

    @property
    def needs_rollouts(self) -> bool:
        """Whether a model answers something."""
        return self.samples_answers and self.written_answers is None

    @property
    def needs_reference(self) -> bool:
        """Whether log-probabilities of the policy as it began are needed."""
        return self.algorithm.needs_reference or isinstance(self.job, PreferenceConfig | KtoConfig)

    @property
    def policy_temperature(self) -> float:
        """What the logits of the trained policy are divided by: that of sampling, where sampled answers are trained."""
        return 1.0 if self.finished_job is not None else self.rollout.sampling.temperature

    @property
    def first_version(self) -> int:
        """The policy version that training begins with; 0 are the weights of ``model.path``, which engines start with.

        Where the trainer packs them, it publishes what has become of them before anything is sampled.
        """
        return 0 if self.model.quantisation is None else 1

    @property
    def steps_per_version(self) -> int:
        """T: steps between two versions. Where no rollout waits for one, a version is what a checkpoint holds."""
        if self.finished_job is None:
            return self.asynchrony.trigger_parameter_sync_step
        return min(self.checkpoint.every_steps, self.optimisation.steps)

    @property
    def runs_code(self) -> bool:
        """Whether a reward component or a tool needs a sandbox."""
        episodes = self.rollout.episodes
        by_tool = isinstance(episodes, ToolEpisodesConfig) and episodes.runs_code
        return self.samples_answers and (by_tool or self.grades_code)

    @property
    def grades_code(self) -> bool:
        """Whether a reward component needs a sandbox."""
        return any(
            component.runs_code if isinstance(component, VerlDefaultConfig) else isinstance(component, CodeConfig)
            for component in self.reward.graders.values()
        )

    @property
    def environment_weight(self) -> float:
        """Factor of the environment's own rewards in the reward; 0 where they are not part of it."""
        return sum(each.weight for each in self.reward.components if isinstance(each, EnvironmentRewardConfig))

    @property
    def joins_branches(self) -> bool:
        """Whether the branches of an agent's episode count as one."""
        return self.rollout.agents is not None and self.rollout.agents.branches == "as_one"

    @property
    def groups_per_step(self) -> int:
        """R: the groups that one step trains."""
        return self.optimisation.groups_per_mini_batch * self.asynchrony.require_batches

    @property
    def admission_budget(self) -> int:
        """Groups that may be outstanding, or consumed since the last publication where that matters."""
        if not self._is_sampled:
            return STEPS_AHEAD * self.groups_per_step
        return self.asynchrony.budget(self.groups_per_step)

    @property
    def shares_devices(self) -> bool:
        """Whether trainer and rollouts, or those that its devices are lent to, take turns on the same devices."""
        return self.resources.turns is not None

    @property
    def is_on_gpus(self) -> bool:
        """Whether trainer and engines compute on GPUs."""
        return self.parallelism.device.startswith("cuda") and self.rollout.engine.device.startswith("cuda")

    @property
    def uses_nccl(self) -> bool:
        """Whether broadcasts of weights go through nccl; else they go through gloo."""
        choice = self.asynchrony.publication.transport
        if choice in {TransportChoice.AUTO, TransportChoice.GROUP}:
            return self.is_on_gpus and not self.shares_devices  # of nccl's members no two are on one device
        return choice is TransportChoice.NCCL

    @property
    def sends_to_engines(self) -> bool:
        """Whether the ranks of engines are themselves members of the weight group."""
        engine = self.rollout.engine
        return isinstance(engine, SglangEngineConfig) and engine.update_weights_from == "distributed"

    @property
    def slice_bytes(self) -> int:
        """Most that one broadcast of weights carries, but for a larger tensor that goes to engines."""
        publication = self.asynchrony.publication
        if publication.slice_megabytes is None and self.sends_to_engines:
            return ENGINE_BUCKET_MEGABYTES << 20
        return publication.slice_bytes

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt in tokens."""
        return self.data.max_prompt_tokens or self.room_for_a_prompt

    @property
    def room_for_a_prompt(self) -> int:
        """Tokens of the engine's context that no answer may take."""
        sampled = max(self.rollout.sampling.max_new_tokens, (self.evaluation and self.evaluation.max_new_tokens) or 0)
        return self.rollout.engine.context_tokens - sampled
