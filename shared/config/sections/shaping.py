"""From grades to the rewards that are trained on: penalties, scaling, normalisation, clipping, filtering, masking."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from flotilla.shared.config.base.model import Config, check_order


class OverlongConfig(Config):
    """A penalty that grows linearly over the last tokens before the limit (DAPO's soft overlong punishment)."""

    max_length: int = Field(ge=1)
    """Tokens; where the penalty reaches its factor."""
    buffer: int = Field(ge=1)
    """Tokens before max_length over which the penalty grows."""
    factor: float = Field(1.0, gt=0)
    """The penalty at max_length."""
    capped: bool = True
    """Beyond max_length the penalty stays at the factor (OpenRLHF); false lets it grow on (verl)."""

    @model_validator(mode="after")
    def _buffer_fits(self) -> "OverlongConfig":
        if self.buffer > self.max_length:
            raise ValueError(f"overlong.buffer ({self.buffer}) exceeds overlong.max_length ({self.max_length})")
        return self


class TruncatedConfig(Config):
    """What becomes of an answer that ran into the length limit: exactly one of scale and value."""

    scale: float | None = Field(None, ge=0, le=1)
    """Multiplies its reward."""
    value: float | None = None
    """Replaces its reward."""

    @model_validator(mode="after")
    def _one_of_both(self) -> "TruncatedConfig":
        if (self.scale is None) == (self.value is None):
            raise ValueError("truncated needs exactly one of scale and value")
        return self


class LengthRewardConfig(Config):
    """A reward for long answers: -penalty up to min_length, then linearly to 0 at max_length (ROLL)."""

    min_length: int = Field(ge=0)
    """Length at which the reward starts to rise."""
    max_length: int = Field(ge=1)
    """Length from which it is 0."""
    penalty: float = Field(0.5, gt=0)
    """Taken off short answers."""

    @model_validator(mode="after")
    def _rises(self) -> "LengthRewardConfig":
        if self.min_length >= self.max_length:
            raise ValueError(f"min_length ({self.min_length}) must be below max_length ({self.max_length})")
        return self


class RepetitionConfig(Config):
    """A penalty for repeated n-grams of words: (1 - distinct / all) times the largest penalty."""

    ngram: int = Field(3, ge=1)
    """Words per n-gram."""
    penalty: float = Field(1.0, gt=0)
    """Taken off an answer that only repeats itself."""


class NormalisationConfig(Config):
    """(reward - mean) / (std + epsilon), over the answers to one task: groups are graded one at a time.

    The greedy answer of remax takes part, so that what is compared with it is on its scale and no deviation is 0 while
    it differs from the others. For the whole batch there are `algorithm.advantage.whiten` and the baselines.
    """

    mean: Literal["group"] | None = "group"
    """What the subtracted mean is taken over; null subtracts nothing."""
    std: Literal["group"] | None = None
    """What the unbiased standard deviation is taken over; null divides by nothing."""
    std_of: Literal["rewards", "centred"] = "rewards"
    """Whether the deviation is that of the rewards, or of the centred rewards."""
    epsilon: float = Field(1e-6, gt=0)
    """Added to the deviation."""
    degenerate: Literal["epsilon", "zero"] = "epsilon"
    """Where there is one reward, or a deviation not above epsilon: divide by epsilon all the same (ROLL RLVR), or give
    0 (ROLL agentic)."""
    clip: tuple[float, float] | None = None
    """Bounds after normalisation; (-1, 3) is RAGEN's asym_clip."""

    @field_validator("clip")
    @classmethod
    def _clip_is_in_order(cls, bounds: tuple[float, float] | None) -> tuple[float, float] | None:
        if bounds is not None:
            check_order("normalisation.clip", bounds)
        return bounds

    @model_validator(mode="after")
    def _does_something(self) -> "NormalisationConfig":
        if self.mean is None and self.std is None:
            raise ValueError("normalisation with neither mean nor std does nothing: set one, or remove normalisation")
        if self.std is None and (self.degenerate != "epsilon" or self.std_of != "rewards"):
            raise ValueError("normalisation.degenerate and std_of have no effect without normalisation.std: set std")
        if self.std_of == "centred" and self.mean is None:
            raise ValueError("normalisation.std_of centred needs normalisation.mean: set mean, or std_of to rewards")
        return self


class ShapingConfig(Config):
    """What happens to a grade, in this order: overlong, truncated, length, repetition, scale, normalise, clip."""

    overlong: OverlongConfig | None = None
    """Penalty near the length limit."""
    truncated: TruncatedConfig | None = None
    """Answers that ran into the limit."""
    length: LengthRewardConfig | None = None
    """Reward for length."""
    repetition: RepetitionConfig | None = None
    """Penalty for repetition."""
    scale: float = Field(1.0, gt=0)
    """Multiplies the reward after the penalties."""
    normalisation: NormalisationConfig | None = None
    """Mean and deviation."""
    clip: float | None = Field(None, gt=0)
    """Bounds the reward to [-clip, clip], last."""


class MeanInRangeConfig(Config):
    """Keep a group whose mean reward lies strictly inside a range (OpenRLHF; ROLL mean_filter)."""

    kind: Literal["mean_in_range"] = "mean_in_range"
    low: float | None = 0.0
    """The mean must be above this; null for no bound (ROLL -1)."""
    high: float | None = 1.0
    """The mean must be below this; null for no bound."""
    keep_single: bool = False
    """Keep a group of one without a look (ROLL)."""
    metric: str | None = Field(None, min_length=1)
    """Judge this metric of a grader instead of the reward, as ``component/metric``, such as ``remote/score``
    (OpenRLHF's scores); a sample without it is judged by its reward."""

    @model_validator(mode="after")
    def _range_is_not_empty(self) -> "MeanInRangeConfig":
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low ({self.low}) must be below high ({self.high}), or every group is dropped")
        if self.low is None and self.high is None:
            raise ValueError("mean_in_range without low and high keeps everything: set a bound, or remove the filter")
        return self


class SpreadAboveConfig(Config):
    """Keep a group whose rewards differ (DAPO's dynamic sampling)."""

    kind: Literal["spread_above"] = "spread_above"
    statistic: Literal["range", "std", "population_std"] = "range"
    """Largest less smallest, which is exactly 0 for equal rewards; or the unbiased (ROLL) or population (verl)
    standard deviation, which rounding can lift above 0."""
    threshold: float = Field(0.0, ge=0)
    """The spread must be above this."""
    keep_single: bool = True
    """Keep a group of one, which has no spread (verl, ROLL)."""
    metric: str | None = Field(None, min_length=1)
    """Judge this metric of a grader instead of the reward, as ``component/metric``, such as ``custom/acc`` (verl's
    ``filter_groups.metric``); a sample without it is judged by its reward."""


GroupFilterConfig = Annotated[MeanInRangeConfig | SpreadAboveConfig, Field(discriminator="kind")]
"""Which groups are trained on."""


class SampleMaskConfig(Config):
    """Which trajectories of a group are left out of the loss, though they took part in the group's statistics."""

    truncated: bool = False
    """Leave out those that reached max_length."""
    max_length: int | None = Field(None, ge=1)
    """Tokens; needed by ``truncated``."""
    difficulty: tuple[float, float] | None = None
    """Leave out groups whose mean reward is not strictly between these."""
    wrong_up_to_length: int | None = Field(None, ge=0)
    """Of the rewards 0 and 1 keep every 1, and 0 only for answers shorter than this; other rewards are left out."""

    @model_validator(mode="after")
    def _agrees(self) -> "SampleMaskConfig":
        if self.truncated != (self.max_length is not None):
            raise ValueError("sample mask: truncated needs max_length, and max_length has no effect without truncated")
        if not self.truncated and self.difficulty is None and self.wrong_up_to_length is None:
            raise ValueError("the sample mask leaves out nothing: set a rule, or remove it")
        if self.difficulty is not None:
            check_order("sample_mask.difficulty", self.difficulty)
        return self
