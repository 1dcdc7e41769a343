"""How an episode goes: one prompt and one completion, or many turns with an environment."""

from typing import Annotated, Final, Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from shared.config.base import Config

ENVIRONMENTS: Final = ("frozen_lake", "sokoban", "countdown", "word_game")
"""Environments that the fleet has itself."""
GYMNASIUM: Final = "gymnasium:"
"""What the name of one of gymnasium's begins with."""


class SingleTurnConfig(Config):
    """One prompt, one completion."""

    kind: Literal["single_turn"] = "single_turn"


class EnvironmentConfig(Config):
    """One environment."""

    environment: str
    """`frozen_lake`, `sokoban`, `countdown`, `word_game`; a class in a file of yours, as `lake.py:Lake`, with
    `reset(seed)` and `step(text)`; or one of gymnasium's whose actions are numbers or text, such as
    `gymnasium:CliffWalking-v1`."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the environment."""
    data_sources: tuple[str, ...] | None = Field(None, min_length=1)
    """Use it for tasks of these data sources; null: for all."""

    @field_validator("environment")
    @classmethod
    def _is_a_name(cls, name: str) -> str:
        file, _, last = name.rpartition(":")
        is_class = file.endswith(".py") and last.isidentifier()
        if name in ENVIRONMENTS or is_class or (name.startswith(GYMNASIUM) and last):
            return name
        raise ValueError(
            f"must be one of {', '.join(ENVIRONMENTS)}, a class in a Python file as lake.py:Lake, or gymnasium:NAME"
        )


class TurnLimits(Config):
    """What bounds an episode of many turns."""

    max_turns: int = Field(10, ge=1)
    """Completions of one episode."""
    max_tokens: int | None = Field(None, ge=2)
    """Tokens of one episode, those that were not sampled included; null is the engine's context."""
    step_seconds: float = Field(60.0, gt=0)
    """Time for one step of an environment or one call of a tool; one that takes longer is an error of the episode."""


class EnvironmentEpisodesConfig(TurnLimits):
    """Turns with an environment, which answers each completion with an observation and a reward.

    The row's column `seed`, a whole number, seeds the environment; a row without one has the task's seed. All members
    of a group begin in the same state.
    """

    kind: Literal["environment"]
    environments: tuple[EnvironmentConfig, ...] = Field(min_length=1)
    """One, or several of which each task takes the first that is for its data source."""

    @model_validator(mode="after")
    def _each_can_be_reached(self) -> Self:
        for number, each in enumerate(self.environments[:-1]):
            if each.data_sources is None:
                raise ValueError(
                    f"environments.{number} is for all tasks, so that those after it have no effect: give it "
                    "data_sources, or put it last"
                )
        return self


EpisodesConfig = Annotated[SingleTurnConfig | EnvironmentEpisodesConfig, Field(discriminator="kind")]
"""How an episode goes, chosen by ``kind``."""
