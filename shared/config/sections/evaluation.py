"""How progress is measured on problems that are never trained on."""

from typing import Self

from pydantic import Field, field_validator, model_validator

from flotilla.shared.config.base.model import Config
from flotilla.shared.config.sections.data import RowsConfig
from flotilla.shared.config.sections.rollout import SamplingConfig

RESERVED = ("reward", "grader", "source")
"""Parts of the names of an evaluation's series that no set may have."""


class HeldOutConfig(RowsConfig):
    """One of several held-out sets."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    """Letters, digits, dot, dash and underscore; its series are called `evaluation/NAME/...`."""

    @field_validator("name")
    @classmethod
    def _leaves_our_names(cls, name: str) -> str:
        if name in RESERVED:
            raise ValueError(f"{name!r} is where other series of an evaluation are: give the set another name")
        return name


class EvaluationConfig(Config):
    """Held-out problems, answered at one pinned policy version while training continues."""

    path: str | None = Field(None, min_length=1)
    """Dataset with the columns that `data` names: a file, pattern or folder."""
    sets: tuple[HeldOutConfig, ...] | None = Field(None, min_length=1)
    """Several held-out sets, or one that is no plain path; each has series of its own beside those of all."""
    every_versions: int | None = Field(None, ge=1)
    """Evaluate each time this many versions were published; null: only at the start and at the end."""
    max_rows: int | None = Field(None, ge=1)
    """Use the first rows of `path` only; a set has its own."""
    greedy: bool = True
    """Take the most likely token; false samples as training does, unless the next three differ."""
    temperature: float | None = Field(None, gt=0, le=2)
    """Softmax temperature of the evaluation; null takes that of ``rollout.sampling``."""
    top_k: int | None = Field(None, ge=0)
    """Keep this many most likely tokens, 0 for all; null takes that of ``rollout.sampling``."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Keep the smallest set of most likely tokens of this probability; null takes that of ``rollout.sampling``."""
    group_size: int = Field(1, ge=1)
    """Answers per problem; accuracy is their mean."""
    pass_reward: float = 1.0
    """An answer passes, as ``pass@K`` counts it, with at least this reward."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Upper bound on sampled tokens; null takes that of ``rollout.sampling``."""
    deadline_seconds: float = Field(600.0, gt=0)
    """An evaluation that takes longer is abandoned and reported as such."""

    @model_validator(mode="after")
    def _rows_are_named_once(self) -> Self:
        if (self.path is None) == (self.sets is None):
            raise ValueError(f"give either path or sets, got {'neither' if self.path is None else 'both'}")
        if self.max_rows is not None and self.sets is not None:
            raise ValueError("max_rows has no effect beside sets: set max_rows of each set")
        names = [each.name for each in self.sets or ()]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"sets: two are called {twice!r}: their series would be one")
        return self

    @model_validator(mode="after")
    def _greedy_samples_nothing(self) -> Self:
        if self.greedy and self.group_size > 1:
            raise ValueError(
                f"evaluation.group_size {self.group_size} has no effect while evaluation.greedy is true, since greedy "
                "answers are all the same: set greedy to false, or remove group_size"
            )
        for name in ("temperature", "top_k", "top_p"):
            if self.greedy and getattr(self, name) is not None:
                raise ValueError(
                    f"evaluation.{name} has no effect while evaluation.greedy is true: set greedy to false, or remove "
                    f"{name}"
                )
        return self

    def sampling(self, training: SamplingConfig) -> SamplingConfig:
        """Return how held-out problems are answered: as in training, but for what is said here."""
        own = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "max_new_tokens")}
        return training.model_copy(update={name: value for name, value in own.items() if value is not None})

    @property
    def all_sets(self) -> tuple[RowsConfig, ...]:
        """The held-out sets, however they were written."""
        return self.sets if self.sets is not None else (RowsConfig(path=self.path, max_rows=self.max_rows),)
