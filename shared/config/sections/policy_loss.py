"""The policy's loss per token: one section per formula, discriminated by ``kind``.

In every formula x = log_probs - old_log_probs, r = exp(x) and A is the advantage. What old_log_probs are is the
algorithm section's ``old_log_probs``; how token losses become one number is its ``aggregation``.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from flotilla.shared.config.base.model import Config

ClipWidth = Annotated[float, Field(ge=0)]
LogRatioClamp = Annotated[float | None, Field(gt=0)]


class _Loss(Config):
    """What every loss has."""

    log_ratio_clamp: LogRatioClamp = 20.0
    """Bound on |x| before the exponential, so that one absurd token cannot overflow; null for none."""


class PpoConfig(_Loss):
    """max(-A r, -A clip(r, 1-clip_low, 1+clip_high)) (Schulman et al. 2017; DAPO for unequal clips)."""

    kind: Literal["ppo"] = "ppo"
    clip_low: float = Field(0.2, ge=0, le=1)
    """How far below 1 the ratio counts."""
    clip_high: float = Field(0.28, ge=0)
    """How far above 1 the ratio counts; larger than clip_low leaves room for rare tokens to grow (DAPO)."""
    dual_clip: float | None = Field(None, gt=1)
    """For A < 0 bound the loss by -A times this, so that a ratio that exploded cannot dominate. verl: 3, always on."""


class GspoConfig(_Loss):
    """PPO's clip on one ratio per sequence, the exponential of its mean x (Zheng et al. 2025)."""

    kind: Literal["gspo"] = "gspo"
    clip_low: float = Field(3e-4, ge=0, le=1)
    """How far below 1 the sequence's ratio counts; means over a sequence move far less than single tokens."""
    clip_high: float = Field(4e-4, ge=0)
    """How far above 1 the sequence's ratio counts."""
    dual_clip: float | None = Field(None, gt=1)
    """See ppo."""
    level: Literal["sequence", "segment"] = "sequence"
    """What shares a ratio: the sequence, or each contiguous run of sampled tokens (ROLL: ratio_type segment)."""
    gradient: Literal["token", "sequence"] = "token"
    """``token``: each token's own log-probability carries the gradient (GSPO-token, verl); ``sequence``: the mean does
    (OpenRLHF, ROLL). They differ where advantages vary within a sequence."""
    mean_advantages: bool = False
    """Give every token the mean advantage of what shares its ratio (AReaL)."""
    log_ratio_clamp: LogRatioClamp = 10.0


class GmpoConfig(_Loss):
    """-A r with one ratio per sequence, the geometric mean of pessimistically clipped ones (Zhao et al. 2025)."""

    kind: Literal["gmpo"] = "gmpo"
    clip_low: ClipWidth = 0.4
    """How far below 0 a token's x counts (the width is in nats)."""
    clip_high: ClipWidth = 0.4
    """How far above 0 a token's x counts."""


class CispoConfig(_Loss):
    """-clip(r, 1-clip_low, 1+clip_high) A log_prob, the clipped ratio without gradient (MiniMax 2025).

    ``clip_low: 1, clip_high: 0`` is ROLL's ``tis``: ratios truncated to [0, 1].
    """

    kind: Literal["cispo"] = "cispo"
    clip_low: float = Field(0.2, ge=0)
    """How far below 1 the weight may go; from 1 on there is no lower bound (MiniMax, verl: 10)."""
    clip_high: float = Field(0.28, ge=0)
    """How far above 1 the weight may go."""
    drop_outside: bool = False
    """Also drop the tokens that PPO's clip would stop: A > 0 above the band, A < 0 below it (ROLL: unified mask)."""


class SapoConfig(_Loss):
    """-(4/tau) sigmoid(tau (r-1)) A, a soft gate in place of the clip (Gao et al. 2025)."""

    kind: Literal["sapo"] = "sapo"
    tau_positive: float = Field(1.0, gt=0)
    """Temperature of the gate where A > 0."""
    tau_negative: float = Field(1.05, gt=0)
    """Temperature of the gate elsewhere."""
    level: Literal["token", "sequence"] = "token"
    """A gate per token, or one per sequence on its mean x and mean A (AReaL)."""


class DppoConfig(_Loss):
    """Policy gradient inside a trust region on the sampled token's probability (DPPO).

    -A min(r, ratio_cap) log_prob without gradient through the ratio; tokens that leave the region are dropped.
    """

    kind: Literal["dppo"] = "dppo"
    divergence: Literal["tv", "binary_kl"] = "tv"
    """Distance that bounds the region: difference of the two probabilities, or the KL of taken against not taken."""
    low: float = Field(0.2, ge=0)
    """Bound where the probability fell."""
    high: float = Field(0.2, ge=0)
    """Bound where the probability rose."""
    sides: Literal["outward", "both"] = "outward"
    """Drop a token only where its gradient points out of the region (verl), or wherever it lies outside (prime-rl)."""
    ratio_cap: float | None = Field(20.0, gt=1)
    """Upper bound on the ratio as a weight. Null: the loss is -A r itself, nothing truncated (prime-rl)."""
    penalty: float = Field(0.0, ge=0)
    """Adds penalty/2 x^2 on every token, dropped ones included."""


class DroConfig(Config):
    """-A log_prob + beta/2 x^2 (Richemond et al. 2024; ROLL and Kimi k1.5 call it kimi15)."""

    kind: Literal["dro"] = "dro"
    beta: float = Field(0.1, gt=0)
    """Strength of the quadratic pull to the old policy."""


class ToprConfig(_Loss):
    """Positive sequences learn by log-likelihood, others with r truncated to [0, 1] as weight (Le Roux et al. 2025)."""

    kind: Literal["topr"] = "topr"
    positive_weight: float = Field(1.0, ge=0)
    """Weight of sequences whose reward is above 0."""
    negative_weight: float = Field(1.0, ge=0)
    """Weight of the others."""


class _CovarianceLoss(_Loss):
    """Losses that treat the tokens of high covariance (A - mean A)(log_prob - mean log_prob) differently."""

    covariance_of: Literal["old", "current"] = "old"
    """``old``: of the old log-probs, selected once over the whole mini-batch, so the loss does not depend on how it is
    cut. ``current``: of the log-probs being trained, selected within each micro-batch (verl)."""


class ClipCovConfig(_CovarianceLoss):
    """PPO, less tokens whose advantage and log-probability covary strongly, drawn at random (Cui et al. 2025)."""

    kind: Literal["clip_cov"] = "clip_cov"
    clip_low: float = Field(0.2, ge=0, le=1)
    """See ppo."""
    clip_high: float = Field(0.2, ge=0)
    """See ppo."""
    fraction: float = Field(2e-4, gt=0, le=1)
    """Share of the sampled tokens to drop (at least one), as far as the band holds that many."""
    lower: float = 1.0
    """Covariances above this are candidates."""
    upper: float = 5.0
    """Covariances below this are candidates."""

    @model_validator(mode="after")
    def _band_is_not_empty(self) -> "ClipCovConfig":
        if self.lower >= self.upper:
            raise ValueError(f"lower ({self.lower}) must be below upper ({self.upper}), or no token is a candidate")
        return self


class KlCovConfig(_CovarianceLoss):
    """-A r, plus coefficient |x| on the tokens of highest covariance (Cui et al. 2025)."""

    kind: Literal["kl_cov"] = "kl_cov"
    fraction: float = Field(2e-4, gt=0, le=1)
    """Share of the sampled tokens that is penalised (at least one)."""
    coefficient: float = Field(0.1, gt=0)
    """Strength of the penalty."""


class PolicyGradientConfig(Config):
    """-A log_prob: no ratio at all (REINFORCE; with GPG's advantages, GPG)."""

    kind: Literal["policy_gradient"] = "policy_gradient"


PolicyLossConfig = Annotated[
    PpoConfig
    | GspoConfig
    | GmpoConfig
    | CispoConfig
    | SapoConfig
    | DppoConfig
    | DroConfig
    | ToprConfig
    | ClipCovConfig
    | KlCovConfig
    | PolicyGradientConfig,
    Field(discriminator="kind"),
]
"""The loss, chosen by ``kind``."""
