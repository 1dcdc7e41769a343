"""The ``algorithm`` section: how rewards become a gradient."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from flotilla.shared.config.base.model import Config, check_order
from flotilla.shared.config.sections.advantage import AdvantageConfig, GaeConfig, GrpoConfig, WhitenConfig
from flotilla.shared.config.sections.correction import CorrectionConfig, RejectionConfig, VetoConfig, WeightConfig
from flotilla.shared.config.sections.distillation import DistillationConfig
from flotilla.shared.config.sections.model import ModelConfig, is_hub_name
from flotilla.shared.config.sections.policy_loss import GspoConfig, PolicyGradientConfig, PolicyLossConfig, PpoConfig

__all__ = [
    "AdvantageConfig",
    "AggregationConfig",
    "AlgorithmConfig",
    "BestResamplingConfig",
    "CorrectionConfig",
    "DistillationConfig",
    "ExtremesResamplingConfig",
    "GaeConfig",
    "GrpoConfig",
    "GspoConfig",
    "KlConfig",
    "KlLossConfig",
    "KlRewardConfig",
    "OldLogProbs",
    "PolicyGradientConfig",
    "PolicyLossConfig",
    "PowerResamplingConfig",
    "PpoConfig",
    "RejectionConfig",
    "ResamplingConfig",
    "SequenceWeightsConfig",
    "SupervisedConfig",
    "ValueLossConfig",
    "VetoConfig",
    "WeightConfig",
    "WhitenConfig",
]

OldLogProbs = Literal["rollout", "recompute", "recompute_at_version"]
"""What the policy ratio is taken against: the sampler's log-probs as recorded; the trainer's own before the step; the
trainer's own under the weights of the version that sampled each token."""


class AggregationConfig(Config):
    """How token losses become one number. All denominators are those of the whole mini-batch."""

    mode: Literal[
        "token-mean",
        "token-sum",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
        "token-sum-norm",
    ] = "token-mean"
    """token-mean: every token weighs the same. seq-mean-token-mean: every sequence does. seq-mean-token-sum: sequences
    weigh by length. The two -norm modes divide the sum by fixed_length, with (verl) or without (ROLL) the number of
    sequences. Sequences without a sampled token do not count."""
    fixed_length: int | None = Field(None, ge=1)
    """Tokens; the constant of the -norm modes (Dr. GRPO). Usually the largest response length."""

    @model_validator(mode="after")
    def _length_belongs_to_norm(self) -> "AggregationConfig":
        is_norm = self.mode.endswith("-norm")
        if is_norm and self.fixed_length is None:
            raise ValueError(
                f"aggregation.mode {self.mode} divides by aggregation.fixed_length, which is not set: set it (a width "
                "taken from the batch would make the loss depend on padding)"
            )
        if not is_norm and self.fixed_length is not None:
            raise ValueError(
                f"aggregation.fixed_length has no effect while aggregation.mode is {self.mode}: remove it, or use "
                "seq-mean-token-sum-norm"
            )
        return self


class _Kl(Config):
    """Divergence from the reference policy, d = log_probs - ref_log_probs."""

    coefficient: float = Field(0.001, gt=0)
    """Strength (the initial one, if ``target`` is set)."""
    target: float | None = Field(None, gt=0)
    """Nats per token; adapts the coefficient so that the observed KL approaches it. Null: the coefficient is fixed."""
    horizon: int = Field(10_000, ge=1)
    """Sequences over which an error of 20 % changes the coefficient by 20 %."""
    value_clamp: float | None = Field(10.0, gt=0)
    """Bound on the absolute value of the estimate per token; null for none."""
    log_ratio_bounds: tuple[float | None, float | None] = (-20.0, 20.0)
    """Bounds on d inside k3's exponential (verl +-20; OpenRLHF -10 and none; ROLL none)."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> "_Kl":
        check_order("kl.log_ratio_bounds", self.log_ratio_bounds)
        return self

    @model_validator(mode="after")
    def _horizon_belongs_to_target(self) -> "_Kl":
        if self.target is None and self.horizon != type(self).model_fields["horizon"].default:
            raise ValueError("kl.horizon has no effect while kl.target is not set: set target, or remove horizon")
        estimator = getattr(self, "estimator", "k3")
        if estimator != "k3" and self.log_ratio_bounds != type(self).model_fields["log_ratio_bounds"].default:
            raise ValueError(
                f"kl.log_ratio_bounds has no effect while kl.estimator is {estimator}, which has no exponential: "
                "remove log_ratio_bounds, or use k3"
            )
        return self


class KlLossConfig(_Kl):
    """KL as a term of the loss."""

    placement: Literal["loss"] = "loss"
    estimator: Literal["k1", "abs", "k2", "k3"] = "k3"
    """Value per token: d, |d|, d^2/2, exp(-d)-1+d (Schulman 2020)."""
    gradient: Literal["estimator", "k2", "weighted_k2"] = "estimator"
    """``estimator``: of the value itself. ``k2``: straight-through, the gradient of d^2/2, whose expectation is the
    KL's (verl's + suffix). ``weighted_k2``: that times min(pi/pi_old, 10) (OpenRLHF unbiased_gradient)."""

    @model_validator(mode="after")
    def _k1_has_a_useless_gradient(self) -> "KlLossConfig":
        if self.estimator == "k1" and self.gradient == "estimator":
            raise ValueError(
                "kl.estimator k1 in the loss has an expected gradient of 0: set kl.gradient to k2, kl.estimator to k2 "
                "or k3, or kl.placement to reward"
            )
        return self


class KlRewardConfig(_Kl):
    """KL subtracted from the reward of every token."""

    placement: Literal["reward"] = "reward"
    estimator: Literal["k1", "abs", "k2", "k3"] = "k1"
    """Value per token: d, |d|, d^2/2, exp(-d)-1+d, where d is that of the old policy."""
    order: Literal["before_baseline", "after_baseline"] = "before_baseline"
    """Whether a sequence's KL is part of the reward that its group is compared by (verl), or is subtracted token by
    token from what the baseline left (OpenRLHF)."""


KlConfig = Annotated[KlLossConfig | KlRewardConfig, Field(discriminator="placement")]
"""Where the KL enters, and how."""


class SupervisedConfig(Config):
    """Adds -log_prob on the sequences whose reward is positive."""

    coefficient: float = Field(0.1, gt=0)
    """Weight of the term, aggregated like the policy loss."""


class SequenceWeightsConfig(Config):
    """Loss weights of whole sequences, rescaled to mean 1 over a step."""

    length: bool = False
    """From 1.5 for the step's shortest answer to 0.5 for its longest (ROLL: length_loss_weight)."""
    difficulty: str | None = Field(None, min_length=1)
    """Column of the dataset with a number from 0 to 1, which weighs 0.5 to 2 (ROLL: difficulty_loss_weight)."""

    @model_validator(mode="after")
    def _weighs_something(self) -> "SequenceWeightsConfig":
        if not self.length and self.difficulty is None:
            raise ValueError(
                "sequence_weights with neither length nor difficulty weighs nothing: set one, or remove it"
            )
        return self


class PowerResamplingConfig(Config):
    """Sequences are drawn by |reward|^power: large rewards, good or bad, appear more often."""

    kind: Literal["pow"] = "pow"
    power: float = Field(2.0, gt=0)
    """Exponent; rewards that are all 0 are drawn alike."""


class ExtremesResamplingConfig(Config):
    """Only sequences with the step's largest or smallest reward are drawn, all of them alike."""

    kind: Literal["max_min"] = "max_min"


class BestResamplingConfig(Config):
    """Sequences with the step's largest reward are drawn four times as often as the others."""

    kind: Literal["max_random"] = "max_random"


ResamplingConfig = Annotated[
    PowerResamplingConfig | ExtremesResamplingConfig | BestResamplingConfig, Field(discriminator="kind")
]
"""PF-PPO (Shen et al. 2024): as many sequences as a step has are drawn from it again, with replacement."""


class ValueLossConfig(Config):
    """The critic's loss: 0.5 max((v-R)^2, (clip(v, v_old +- clip) - R)^2)."""

    clip: float | None = Field(0.5, gt=0)
    """How far a value may move in one mini-batch and still count (verl, OpenRLHF 0.5; ROLL none); null for none."""
    aggregation: AggregationConfig = AggregationConfig()
    """How token errors become one number."""
    whiten_returns: bool = False
    """The critic learns returns of mean 0 and variance 1, by the moments of all returns so far; its values are brought
    back to the rewards' scale before advantages are made of them."""
    warmup_steps: int = Field(0, ge=0)
    """Steps in which only the critic learns."""
    learning_rate: float | None = Field(None, gt=0)
    """Peak learning rate of the critic; null takes the policy's. A critic's head starts from nothing and takes more."""
    warmup_updates: int | None = Field(None, ge=0)
    """Updates over which the critic's learning rate rises; null takes the policy's. Start and schedule are shared."""
    path: str | None = Field(None, min_length=1)
    """The model that the critic begins as: a directory in Hugging Face format, or a name on the hub, of the policy's
    architecture and tokenizer. Of a reward model it takes the head, too. Null: the policy's body."""
    revision: str | None = Field(None, min_length=1)
    """Branch, tag or commit of a hub's model; null is its main branch."""

    @property
    def model(self) -> ModelConfig | None:
        """The critic, as what finds and downloads it reads it; None where it begins as the policy."""
        return None if self.path is None else ModelConfig(path=self.path, revision=self.revision)

    @model_validator(mode="after")
    def _revision_of_a_hub_name(self) -> "ValueLossConfig":
        if self.revision is not None and (self.path is None or not is_hub_name(self.path)):
            raise ValueError("revision has an effect only where path is a name on the hub, as owner/name: leave it out")
        return self


WITHOUT_SEQUENCE_BASELINE = frozenset({"gae", "turn_reinforce", "optimal_token_baseline"})
"""Estimators that take rewards token by token: it does not matter when the KL is subtracted."""
WITH_SCORES_OF_THEIR_OWN = frozenset({"gdpo"})
"""Estimators that compare reward components."""


class AlgorithmConfig(Config):
    """How rewards become a gradient; the defaults are GRPO with DAPO's clip and token mean."""

    advantage: AdvantageConfig = GrpoConfig()
    """From rewards to one number per token."""
    policy_loss: PolicyLossConfig = PpoConfig()
    """From that number to a loss per token."""
    aggregation: AggregationConfig = AggregationConfig()
    """From losses per token to one."""
    kl: KlConfig | None = None
    """Pull to the reference policy; null for none, and no reference model is loaded."""
    distillation: DistillationConfig | None = None
    """A teacher beside the reward, or in its place; null for none. See docs/jobs.md."""
    old_log_probs: OldLogProbs = "rollout"
    """The ratio's denominator. ``rollout`` costs no forward pass and lets the loss's own clip see staleness."""
    correction: CorrectionConfig | Literal["auto"] | None = "auto"
    """``auto``: token weights truncated at 2 wherever the loss itself does not correct for the sampler: always, except
    when its ratio is taken against the sampler. Null for none."""
    router_replay: Literal["R2", "R3"] | None = None
    """Which experts of a mixture compute each token in training, whatever its routers would choose now. R3: those that
    the engine chose when it sampled, in the passes of old_log_probs and in all updates; its record travels with each
    trajectory. R2: those that the trainer's pass of old_log_probs recompute chose, in all updates. The reference, a
    teacher and a critic choose for themselves. Null: every pass does. See docs/algorithms.md."""
    policy_coefficient: float = Field(1.0, ge=0)
    """Weight of the policy loss beside the terms of kl, entropy and supervised, which have their own."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    supervised: SupervisedConfig | None = None
    """Likelihood term on sequences with a positive reward; null for none."""
    sequence_weights: SequenceWeightsConfig | None = None
    """Weights of whole sequences in the policy loss; null for none."""
    resampling: ResamplingConfig | None = None
    """Draw the step's sequences again by their rewards, once advantages are known and before it is split into
    mini-batches (PF-PPO); the draw depends on the seed and the step's number alone. Null trains each once."""
    value_loss: ValueLossConfig | None = None
    """The critic's loss; null for its defaults where there is a critic."""

    @model_validator(mode="after")
    def _refuse_what_has_no_effect(self) -> "AlgorithmConfig":
        if self.value_loss is not None and not self.needs_critic:
            raise ValueError(
                f"algorithm.value_loss has no effect while algorithm.advantage.kind is {self.advantage.kind}, which "
                "has no critic: remove value_loss, or use gae"
            )
        if not self.policy_coefficient and not self._has_other_terms:
            raise ValueError(
                "algorithm.policy_coefficient 0 leaves no loss to train on: raise it, or set kl with placement loss, "
                "entropy_coefficient or supervised"
            )
        self._check_kl_order()
        self._check_pure_distillation()
        if isinstance(self.correction, CorrectionConfig):
            if self.old_log_probs == "rollout" and self.correction.numerator == "old":
                raise ValueError(
                    "algorithm.correction has no effect while algorithm.old_log_probs is rollout, since old and "
                    "rollout log-probs are then the same: set old_log_probs to recompute, correction.numerator to "
                    "current, or correction to null"
                )
            if self.correction.numerator == "current" and not self._loss_has_no_ratio and self.correction.weight:
                raise ValueError(
                    f"algorithm.correction.numerator current would count the ratio of algorithm.policy_loss.kind "
                    f"{self.policy_loss.kind} twice: set numerator to old, or correction.weight to null"
                )
        if self.old_log_probs != "rollout" and self._loss_has_no_ratio and not self._old_policy_is_used:
            raise ValueError(
                f"algorithm.old_log_probs {self.old_log_probs} has no effect while algorithm.policy_loss.kind is "
                f"{self.policy_loss.kind} and nothing else uses old log-probs: set old_log_probs to rollout"
            )
        return self

    @property
    def _has_other_terms(self) -> bool:
        return isinstance(self.kl, KlLossConfig) or bool(self.entropy_coefficient) or self.supervised is not None

    def _check_kl_order(self) -> None:
        if not isinstance(self.kl, KlRewardConfig):
            return
        kind = self.advantage.kind
        has_baseline = kind not in WITHOUT_SEQUENCE_BASELINE and getattr(self.advantage, "baseline", "") != "none"
        if self.kl.order == "after_baseline" and not has_baseline:
            raise ValueError(
                f"algorithm.kl.order after_baseline has no effect while algorithm.advantage.kind is {kind}, which "
                "subtracts no baseline from a sequence's reward: remove order"
            )
        if self.kl.order == "before_baseline" and kind in WITH_SCORES_OF_THEIR_OWN:
            raise ValueError(
                f"algorithm.kl.order before_baseline has no effect while algorithm.advantage.kind is {kind}, which "
                "compares other scores than the reward: set order to after_baseline, or kl.placement to loss"
            )

    def _check_pure_distillation(self) -> None:
        if not self.is_pure_distillation:
            return
        unused = {
            "advantage": self.advantage != GrpoConfig(),
            "kl": isinstance(self.kl, KlRewardConfig),
            "supervised": self.supervised is not None,
            "resampling": self.resampling is not None,
        }
        for name in (name for name, is_set in unused.items() if is_set):
            raise ValueError(
                f"algorithm.{name} has no effect that is wanted while algorithm.distillation.pure leaves rewards out: "
                f"remove {name}{', or set its placement to loss' if name == 'kl' else ''}, or set pure to false"
            )

    @property
    def is_pure_distillation(self) -> bool:
        """Whether a teacher alone teaches, and rewards do not."""
        return self.distillation is not None and self.distillation.pure

    @property
    def models(self) -> dict[str, ModelConfig]:
        """The models that the trainer loads beside the policy, by the dotted field of their path."""
        teachers = {} if self.distillation is None else self.distillation.models
        found = {f"algorithm.distillation.{field}": model for field, model in teachers.items()}
        critic = None if self.value_loss is None else self.value_loss.model
        return found if critic is None else {**found, "algorithm.value_loss.path": critic}

    @property
    def needs_critic(self) -> bool:
        """Whether advantages need values."""
        return isinstance(self.advantage, GaeConfig)

    @property
    def resolved_value_loss(self) -> ValueLossConfig:
        """The critic's section, or its defaults."""
        return self.value_loss or ValueLossConfig()

    @property
    def needs_reference(self) -> bool:
        """Whether reference log-probs are needed."""
        return self.kl is not None

    @property
    def resolved_correction(self) -> CorrectionConfig | None:
        """The correction with ``auto`` filled in."""
        if self.correction != "auto":
            return self.correction
        if self.old_log_probs != "rollout":
            return CorrectionConfig()
        return CorrectionConfig(numerator="current") if self._loss_has_no_ratio else None

    @property
    def takes_recorded_for_policy(self) -> bool:
        """Whether what the engine recorded counts as the policy's own log-probs, and not as the sampler's alone."""
        return self.old_log_probs == "rollout" and (not self._loss_has_no_ratio or self._old_policy_is_used)

    @property
    def _loss_has_no_ratio(self) -> bool:
        return isinstance(self.policy_loss, PolicyGradientConfig)

    @property
    def _old_policy_is_used(self) -> bool:
        uses_kl = isinstance(self.kl, KlRewardConfig) or (
            isinstance(self.kl, KlLossConfig) and self.kl.gradient == "weighted_k2"
        )
        corrects = self.correction == "auto" or (
            isinstance(self.correction, CorrectionConfig) and self.correction.numerator == "old"
        )
        reads = self.advantage.kind == "optimal_token_baseline" or self.distillation is not None
        return uses_kl or corrects or reads
