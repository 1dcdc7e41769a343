"""How rewards become advantages: one section per estimator, discriminated by ``kind``.

Every estimator leaves its advantages unwhitened and unclipped unless ``whiten`` or ``clip`` says otherwise; the
estimators whose definition includes whitening have it as their default.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self, TypeVar, get_args

from pydantic import Field, model_validator

from flotilla.shared.config.base.model import Config

GroupOfOne = Literal["zero", "raw"]
MaskedTokens = Literal["skip", "step"]


class WhitenConfig(Config):
    """Shift advantages to mean 0 and, unless ``centre_only``, scale them to variance 1, over all sampled tokens."""

    centre_only: bool = False
    """Remove the mean and keep the scale (OpenRLHF: no_advantage_std_norm)."""
    variance: Literal["unbiased", "population"] = "unbiased"
    """Divide the squared deviations by N-1 (verl, ROLL) or by N (OpenRLHF)."""
    epsilon: float = Field(1e-8, gt=0)
    """Keeps the division finite when all advantages are equal."""
    floor: Literal["add", "clamp"] = "add"
    """Add epsilon to the variance (verl, ROLL), or use it as the variance's least value (OpenRLHF)."""
    of_one: GroupOfOne = "zero"
    """A batch with one sampled token has no variance: it gets advantage 0, or keeps its own (ROLL)."""

    @model_validator(mode="after")
    def _centring_divides_by_nothing(self) -> "WhitenConfig":
        if self.centre_only:
            for name in ("variance", "epsilon", "floor"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(
                        f"whiten.{name} has no effect while whiten.centre_only is true, which divides by nothing: "
                        f"remove {name}, or set centre_only to false"
                    )
        return self


Estimator = TypeVar("Estimator", bound=Config)


class _Estimator(Config):
    """What every estimator has after its own formula."""

    MIN_SCORED: ClassVar[int] = 1
    """Members with a reward that a group of several must have to be trained: 2 where they are compared."""

    whiten: WhitenConfig | None = None
    """Whitening over the sampled tokens of the whole batch, after the estimator."""
    score_clip: tuple[float, float] | None = None
    """Bounds of each sequence's reward after its baseline and before a KL per token; null for none (OpenRLHF:
    reward_clip_range, (-10, 10))."""
    clip: float | None = Field(None, gt=0)
    """Clamp advantages to [-clip, clip], after whitening."""

    @property
    def learns_from_one(self) -> bool:
        """Whether a group of one member teaches anything."""
        return self.MIN_SCORED == 1 or getattr(self, "group_of_one", "zero") == "raw"

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        if self.score_clip is not None and self.score_clip[0] >= self.score_clip[1]:
            raise ValueError(f"score_clip must be (low, high) with low below high, got {self.score_clip}")
        return self


def _refuse_idle_epsilon(config: Estimator, switch: str, is_used: bool) -> Estimator:
    if not is_used and getattr(config, "epsilon", None) != type(config).model_fields["epsilon"].default:
        raise ValueError(
            f"advantage.epsilon has no effect while advantage.{switch} is false, which divides by nothing: remove "
            f"epsilon, or set {switch} to true"
        )
    return config


class GaeConfig(_Estimator):
    """Generalised advantage estimation (Schulman et al. 2016); needs a critic."""

    kind: Literal["gae"] = "gae"
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per sampled token."""
    lam: float = Field(0.95, ge=0, le=1)
    """Bias (0) against variance (1). verl and OpenRLHF default to 1, ROLL to 0.95."""
    masked_tokens: MaskedTokens = "skip"
    """Tokens between turns that the policy did not sample: ``skip`` carries value and advantage over them (verl);
    ``step`` treats each as a step with value 0 and reward 0 (OpenRLHF)."""
    whiten: WhitenConfig | None = WhitenConfig()


class _RewardToGo(_Estimator):
    """Estimators whose advantage is the discounted sum of later rewards."""

    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per sampled token."""
    masked_tokens: MaskedTokens = "skip"
    """``skip``: a token the policy did not sample costs no discount step (verl); ``step``: it does (OpenRLHF)."""
    baseline: Literal["none", "batch_mean"] = "none"
    """Subtracted from each sequence's reward before it is spread over the tokens."""
    divide_by_std: bool = False
    """Divide each sequence's reward, after its baseline, by the batch's unbiased standard deviation plus 1e-6."""
    compared_with: Literal["batch", "run"] = "batch"
    """Whose mean and standard deviation these are: those of the step's rewards, or of all rewards that the run has
    trained on, this step's included (ROLL: running). The checkpoint holds the latter."""

    @property
    def follows_the_run(self) -> bool:
        """Whether a step's advantages depend on the rewards of those before."""
        return self.compared_with == "run"

    @model_validator(mode="after")
    def _is_compared(self) -> Self:
        if self.follows_the_run and self.baseline == "none" and not self.divide_by_std:
            raise ValueError(
                "advantage.compared_with run has no effect while advantage.baseline is none and "
                "advantage.divide_by_std is false: set one of them, or remove compared_with"
            )
        return self


class ReinforceConfig(_RewardToGo):
    """Discounted reward-to-go, optionally less the batch's mean reward (Williams 1992; OpenRLHF flash_reinforce)."""

    kind: Literal["reinforce"] = "reinforce"


class ReinforcePlusPlusConfig(_RewardToGo):
    """Discounted reward-to-go, whitened over the batch (Hu 2025)."""

    kind: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    whiten: WhitenConfig | None = WhitenConfig()


class TurnReinforceConfig(_Estimator):
    """Reward-to-go per turn: one discount step per contiguous run of sampled tokens (ROLL agentic_reinforce)."""

    kind: Literal["turn_reinforce"] = "turn_reinforce"
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per turn. A turn's reward is that of its last token."""


class GrpoConfig(_Estimator):
    """Reward less the group's mean, over the group's standard deviation (Shao et al. 2024)."""

    MIN_SCORED: ClassVar[int] = 2
    kind: Literal["grpo"] = "grpo"
    normalise_by_std: bool = True
    """Divide by the group's unbiased standard deviation plus epsilon."""
    epsilon: float = Field(1e-4, gt=0)
    """Added to the standard deviation. Larger than verl's 1e-6 and OpenRLHF's 1e-9, which turn rounding noise among
    nearly equal rewards into advantages of size 1."""
    group_of_one: GroupOfOne = "zero"
    """A group with one member has nothing to compare with: advantage 0 (ROLL), or the raw reward (verl)."""

    @model_validator(mode="after")
    def _epsilon_divides(self) -> Self:
        return _refuse_idle_epsilon(self, "normalise_by_std", self.normalise_by_std)


class DrGrpoConfig(_Estimator):
    """Reward less the group's mean (Liu et al. 2025); aggregate with seq-mean-token-sum-norm as the paper does."""

    MIN_SCORED: ClassVar[int] = 2
    kind: Literal["dr_grpo"] = "dr_grpo"
    group_of_one: GroupOfOne = "zero"
    """See grpo."""


class PassAtKConfig(_Estimator):
    """Only the best of a group counts: best less second best (Walder and Karkhanis 2025). Groups of two or more."""

    MIN_SCORED: ClassVar[int] = 2
    kind: Literal["grpo_passk"] = "grpo_passk"
    normalise_by_std: bool = True
    """Divide by the group's unbiased standard deviation plus epsilon."""
    epsilon: float = Field(1e-4, gt=0)
    """Added to the standard deviation."""

    @model_validator(mode="after")
    def _epsilon_divides(self) -> Self:
        return _refuse_idle_epsilon(self, "normalise_by_std", self.normalise_by_std)


class GdpoConfig(_Estimator):
    """Each reward component normalised in its group, weighted, summed and whitened (Liu et al. 2026)."""

    MIN_SCORED: ClassVar[int] = 2
    kind: Literal["gdpo"] = "gdpo"
    components: tuple[str, ...] = Field(min_length=1)
    """Names of the reward components, in order."""
    weights: tuple[float, ...] | None = None
    """One weight per component; absent, 1 each."""
    epsilon: float = Field(1e-4, gt=0)
    """Added to each component's standard deviation."""
    group_of_one: GroupOfOne = "zero"
    """See grpo."""
    whiten: WhitenConfig | None = WhitenConfig()

    @model_validator(mode="after")
    def _one_weight_each(self) -> "GdpoConfig":
        if self.weights is not None and len(self.weights) != len(self.components):
            raise ValueError(
                f"weights has {len(self.weights)} entries for {len(self.components)} components: give one each"
            )
        return self


class RlooConfig(_Estimator):
    """Reward less the mean of the group's other members (Ahmadian et al. 2024)."""

    MIN_SCORED: ClassVar[int] = 2
    kind: Literal["rloo"] = "rloo"
    group_of_one: GroupOfOne = "zero"
    """See grpo."""


class ReinforceBaselineConfig(_Estimator):
    """REINFORCE++-baseline: reward less the group's mean, whitened over the batch's tokens (Hu 2025)."""

    MIN_SCORED: ClassVar[int] = 2
    kind: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    group_of_one: GroupOfOne = "zero"
    """See grpo."""
    whiten: WhitenConfig | None = WhitenConfig()


class OpoConfig(_Estimator):
    """Reward less the group's length-weighted mean (Hao et al. 2025)."""

    MIN_SCORED: ClassVar[int] = 2
    kind: Literal["opo"] = "opo"
    group_of_one: GroupOfOne = "zero"
    """See grpo."""


class GpgConfig(_Estimator):
    """Reward less the group's mean, scaled by sequences / sequences that teach (Chu et al. 2025)."""

    MIN_SCORED: ClassVar[int] = 2
    kind: Literal["gpg"] = "gpg"
    scale_over: Literal["differing_groups", "nonzero_rewards"] = "differing_groups"
    """Which sequences count as informative: those of groups whose rewards differ (the paper's B - M, eq. 7), or those
    with a reward other than 0 (verl)."""
    divisor: float = Field(1.0, gt=0)
    """Divides every advantage (the paper's F_norm)."""
    group_of_one: GroupOfOne = "zero"
    """See grpo."""


class RemaxConfig(_Estimator):
    """Reward-to-go less the reward of a greedy answer to the same prompt (Li et al. 2024), which is sampled besides
    the group and not trained."""

    kind: Literal["remax"] = "remax"


class TokenBaselineConfig(_Estimator):
    """Reward-to-go less the variance-minimising baseline of its position in the group (optimal token baseline)."""

    MIN_SCORED: ClassVar[int] = 2
    kind: Literal["optimal_token_baseline"] = "optimal_token_baseline"
    positions: Literal["all", "sampled"] = "all"
    """Compare tokens at equal distance from the response's start, counting every token, or only those that the policy
    sampled (verl's tir variant, for several turns)."""
    drop_tail: bool = True
    """Beyond the second-longest member there is no other to compare with: the baseline there is 0."""
    epsilon: float = Field(1e-8, gt=0)
    """Keeps the weighted mean finite."""

    @property
    def learns_from_one(self) -> bool:
        """Alone it has no baseline, and is reward-to-go."""
        return True


class _Agentic(_Estimator):
    """Estimators over steps of an environment, where each turn is a step; one completion alone is one step."""

    gamma: float = Field(0.95, ge=0, le=1)
    """Discount per environment step."""
    divide_by_std: bool = True
    """Divide centred scores by their group's unbiased standard deviation plus epsilon (ROLL: mean_std)."""
    epsilon: float = Field(1e-6, gt=0)
    """Added to the standard deviation; groups whose deviation does not exceed it get 0."""

    @model_validator(mode="after")
    def _epsilon_divides(self) -> Self:
        return _refuse_idle_epsilon(self, "divide_by_std", self.divide_by_std)


class GigpoConfig(_Agentic):
    """Episode score in its group, plus discounted step return among steps in the same state (Feng et al. 2025)."""

    MIN_SCORED: ClassVar[int] = 2
    kind: Literal["gigpo"] = "gigpo"
    episode_weight: float = 1.0
    """Weight of the episode's part."""
    step_weight: float = 1.0
    """Weight of the step's part."""

    @property
    def learns_from_one(self) -> bool:
        """Alone its steps are compared with those from the same state."""
        return True


class StepReinforceConfig(_Agentic):
    """Discounted step return, normalised among all steps of the trajectory group, or of everything that is trained."""

    kind: Literal["step_reinforce"] = "step_reinforce"
    over: Literal["group", "batch"] = "group"
    """Which steps a step is compared with: those of its group, or all of the training step."""


AdvantageConfig = Annotated[
    GaeConfig
    | ReinforceConfig
    | ReinforcePlusPlusConfig
    | TurnReinforceConfig
    | GrpoConfig
    | DrGrpoConfig
    | PassAtKConfig
    | GdpoConfig
    | RlooConfig
    | ReinforceBaselineConfig
    | OpoConfig
    | GpgConfig
    | TokenBaselineConfig
    | RemaxConfig
    | GigpoConfig
    | StepReinforceConfig,
    Field(discriminator="kind"),
]
"""The estimator, chosen by ``kind``."""

ESTIMATORS: Mapping[str, type[_Estimator]] = {
    each.model_fields["kind"].default: each for each in get_args(get_args(AdvantageConfig)[0])
}
"""All of them, by ``kind``."""
