"""Correction for the gap between the policy that sampled a token and the one the loss takes as old."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from flotilla.shared.config.base.model import Config, check_order

Level = Literal["token", "segment", "geometric", "sequence"]
"""What shares one ratio: a token; a contiguous run of sampled tokens (exp of its mean x); a sequence by its mean x
(geometric); a sequence by its sum of x, the ratio of the two policies' probabilities of the whole answer."""


class WeightConfig(Config):
    """Importance weight exp(x) on the loss of each token, x = numerator's log-prob - rollout_log_probs."""

    level: Level = "token"
    """What shares a weight."""
    upper: float | None = Field(2.0, gt=0)
    """Largest weight; null for no bound."""
    lower: float | None = Field(None, gt=0)
    """Least weight; null for no bound."""
    outside: Literal["clamp", "zero"] = "clamp"
    """What happens beyond a bound: clamped to it (truncated importance sampling), or 0 (IcePop)."""
    batch_normalise: bool = False
    """Divide by the mini-batch's mean weight: over tokens at the levels token and segment, else over sequences."""

    @model_validator(mode="after")
    def _bounds_make_sense(self) -> "WeightConfig":
        if self.upper is None and self.lower is None and self.outside == "zero":
            raise ValueError("weight.outside: zero has no effect without weight.lower or weight.upper: set a bound")
        if self.upper is not None and self.lower is not None and self.lower > self.upper:
            raise ValueError(f"weight.lower ({self.lower}) is above weight.upper ({self.upper}): swap them")
        return self


class RejectionConfig(Config):
    """One test; tokens (or whole sequences) that fail it leave the response mask. Several tests are combined by AND."""

    statistic: Literal["ratio", "k1", "k2", "k3", "reverse_k3", "binary_kl", "tv", "probability_difference"] = "ratio"
    """Of x and the two probabilities p (numerator) and q (sampler): exp(x); k1 = -x, k2 = x^2/2, k3 = exp(x)-1-x, the
    estimators of KL(sampler || numerator); reverse_k3 = exp(-x)-1+x, that of KL(numerator || sampler); the KL of taken
    against not taken; |p-q|; p-q."""
    scope: Literal["token", "segment", "sequence"] = "token"
    """What is tested, and leaves together."""
    reduce: Literal["mean", "sum", "max"] = "mean"
    """How a segment's or sequence's tokens become one number. A ratio's mean and sum are taken of x: the geometric
    mean of the ratios, and their product."""
    lower: float | None = None
    """Least value kept; null for no bound."""
    upper: float | None = None
    """Largest value kept; null for no bound."""

    @model_validator(mode="after")
    def _tests_something(self) -> "RejectionConfig":
        if self.lower is None and self.upper is None:
            raise ValueError("a rejection without lower and upper tests nothing: set a bound, or remove it")
        if self.lower is not None and self.upper is not None and self.lower > self.upper:
            raise ValueError(f"lower ({self.lower}) is above upper ({self.upper}): nothing would be kept")
        if self.scope == "token" and self.reduce != "mean":
            raise ValueError(
                f"reduce: {self.reduce} has no effect while scope is token: remove reduce, or set scope to sequence"
            )
        return self


class VetoConfig(Config):
    """One token outside the band removes its whole sequence: the two policies do not agree on the text at all."""

    lower: float | None = Field(1e-4, gt=0)
    """Least ratio exp(x) of any sampled token; null for no bound."""
    upper: float | None = Field(None, gt=0)
    """Largest ratio of any sampled token; null for no bound."""

    @model_validator(mode="after")
    def _tests_something(self) -> "VetoConfig":
        if self.lower is None and self.upper is None:
            raise ValueError("a veto without lower and upper tests nothing: set a bound, or remove it")
        check_order("veto's lower and upper", (self.lower, self.upper))
        return self


class CorrectionConfig(Config):
    """What is done about x = numerator - rollout_log_probs: weight, reject, veto, in any combination."""

    numerator: Literal["old", "current"] = "old"
    """``old``: the loss's old policy against the sampler, fixed for the batch. ``current``: the policy being trained
    against the sampler, taken again in every micro-batch (for losses without a ratio of their own)."""
    weight: WeightConfig | None = WeightConfig()
    """Multiplies each token's loss; null for none."""
    rejections: tuple[RejectionConfig, ...] = ()
    """Tests on tokens, segments and sequences."""
    veto: VetoConfig | None = None
    """Tests on single tokens that remove sequences."""
    statistics_over: Literal["original", "surviving"] = "original"
    """Which tokens make the numbers of segments and sequences, those of weights too: all that were sampled (verl), or
    those that the tests of single tokens have kept (SkyRL)."""
    denominators: Literal["surviving", "original"] = "surviving"
    """Whether the loss is averaged over what rejection left (verl), or over all sampled tokens (OpenRLHF, AReaL)."""
    log_ratio_clamp: Annotated[float | None, Field(gt=0)] = 20.0
    """Bound on |x| before the exponential; null for none."""

    @model_validator(mode="after")
    def _does_something(self) -> "CorrectionConfig":
        rejects = bool(self.rejections) or self.veto is not None
        if self.weight is None and not rejects:
            raise ValueError(
                "correction has neither weight nor rejections nor veto: set one, or set correction to null"
            )
        if self.denominators == "original" and not rejects:
            raise ValueError(
                "correction.denominators has no effect without correction.rejections or correction.veto: remove it"
            )
        if self.numerator == "current" and rejects and self.denominators == "surviving":
            raise ValueError(
                "correction.denominators: surviving cannot be known before the forward pass while "
                "correction.numerator is current: set denominators to original, or numerator to old"
            )
        if self.numerator == "current" and self.weight is not None and self.weight.batch_normalise:
            raise ValueError(
                "correction.weight.batch_normalise needs the mini-batch's weights before the forward pass, which "
                "correction.numerator: current does not have: set batch_normalise to false, or numerator to old"
            )
        return self

    @model_validator(mode="after")
    def _has_tokens_left_and_counts_them(self) -> "CorrectionConfig":
        shared = any(each.scope != "token" for each in self.rejections) or (
            self.weight is not None and self.weight.level != "token"
        )
        if self.statistics_over == "surviving" and not (shared and any(e.scope == "token" for e in self.rejections)):
            raise ValueError(
                "correction.statistics_over surviving has no effect without a test of scope token beside a test or a "
                "weight of segments or sequences: remove it"
            )
        return self
