"""Rules: what the gateway does by itself once a series of the run behaves as a rule says."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from flotilla.shared.config.base.model import Config
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.schemas.metric_names import check_names

MOST_RULES = 32


class PlateauConfig(Config):
    """The series has not improved for some of its points, as early stopping and reduced rates ask."""

    kind: Literal["plateau"] = "plateau"
    patience: int = Field(ge=1, le=100_000)
    """Points in a row without an improvement on the best one before them."""
    mode: Literal["max", "min"] = "max"
    """Whether more is better, or less."""
    min_delta: float = Field(0.0, ge=0)
    """An improvement is one by more than this."""


class AboveConfig(Config):
    """The series is above a bound."""

    kind: Literal["above"] = "above"
    bound: float
    """What each of the points exceeds."""
    patience: int = Field(1, ge=1, le=100_000)
    """Points in a row."""


class BelowConfig(Config):
    """The series is below a bound."""

    kind: Literal["below"] = "below"
    bound: float
    """What each of the points falls short of."""
    patience: int = Field(1, ge=1, le=100_000)
    """Points in a row."""


class SetConfig(Config):
    """Give keys that can change while the experiment runs other values (docs/steering.md lists them)."""

    kind: Literal["set"] = "set"
    values: Mapping[str, Any] = Field(min_length=1, max_length=32)
    """New values by the key's path, such as ``rollout.sampling.temperature: 0.8``."""


class ScaleConfig(Config):
    """Multiply the present value of keys that can change while the experiment runs."""

    kind: Literal["scale"] = "scale"
    factors: Mapping[str, Annotated[float, Field(gt=0)]] = Field(min_length=1, max_length=32)
    """Factors by the key's path, such as ``optimisation.learning_rate: 0.5``. A whole number stays one."""
    at_least: Mapping[str, float] = {}
    """Bounds by the key's path: a value never gets below."""
    at_most: Mapping[str, float] = {}
    """Bounds by the key's path: a value never gets above."""


class NextPoolConfig(Config):
    """Move to the next pool of the curriculum: the pool with the largest weight exchanges it with the one after it."""

    kind: Literal["next_pool"] = "next_pool"


class PauseConfig(Config):
    """Pause the experiment: the trainer starts no further step until it is resumed."""

    kind: Literal["pause"] = "pause"


class StopConfig(Config):
    """Stop the experiment; it can be resumed from its checkpoint."""

    kind: Literal["stop"] = "stop"


Condition = Annotated[PlateauConfig | AboveConfig | BelowConfig, Field(discriminator="kind")]
Effect = Annotated[SetConfig | ScaleConfig | NextPoolConfig | PauseConfig | StopConfig, Field(discriminator="kind")]


class RuleConfig(Config):
    """A rule: once a series behaves so, that is done."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    """Letters, digits, dot, dash and underscore; changes that it makes are recorded as made by ``rule NAME``."""
    metric: str = Field("evaluation/accuracy", min_length=1, max_length=256)
    """The series that it watches (docs/metrics.md)."""
    when: Condition
    """What the series has to look like; of its points since the rule acted last."""
    then: Effect
    """What is done."""
    times: int = Field(1, ge=1, le=256)
    """How often it acts at most."""

    @field_validator("metric")
    @classmethod
    def _is_a_series(cls, metric: str) -> str:
        try:
            check_names([metric], ())
        except InvalidRequest as error:
            raise ValueError(error.detail) from None
        return metric
