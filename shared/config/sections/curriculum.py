"""Which prompts are asked how often, by how well they were answered so far."""

from typing import Self

from pydantic import Field, model_validator

from flotilla.shared.config.base.model import Config


class PoolConfig(Config):
    """Rows whose answers had such rewards so far."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$")
    """In figures and changes."""
    at_least: float | None = None
    """Lowest mean reward of a row in it; null: none."""
    below: float | None = None
    """Mean rewards are below this; null: any."""
    weight: float = Field(1.0, ge=0)
    """Chance that a group's row is of this pool, relative to the other weights."""


class CurriculumConfig(Config):
    """Pools of rows by the mean reward of their groups so far, as graded; each group draws a pool, and its row there.

    Of a pool the rows that were asked least come first, in an order that the seed makes. A row's mean follows its
    newest groups; what was graded by then moves rows from pool to pool when a new version is current.
    """

    pools: tuple[PoolConfig, ...] = Field(min_length=1, max_length=16)
    """Bands of mean rewards that together hold every number; in the order in which `next_pool` of a rule goes."""
    unseen: float = Field(1.0, ge=0)
    """Weight of the rows of which no group was graded yet."""
    memory: float = Field(0.5, ge=0, lt=1)
    """Share of the mean before in a row's new mean; the rest is that of its newest group."""

    @model_validator(mode="after")
    def _bands_meet(self) -> Self:
        names = [pool.name for pool in self.pools]
        if len({*names, "unseen"}) <= len(names):
            raise ValueError(f"pools: each has a name of its own, and none is called unseen, got {', '.join(names)}")
        ordered = sorted(self.pools, key=lambda pool: float("-inf") if pool.at_least is None else pool.at_least)
        starts, ends = [pool.at_least for pool in ordered], [pool.below for pool in ordered]
        if starts[0] is not None or ends[-1] is not None or starts[1:] != ends[:-1] or None in starts[1:]:
            raise ValueError(
                "pools: the bands have to meet, each at_least being the below of the one before, with no at_least in "
                "the lowest and no below in the highest"
            )
        if not self.unseen and not any(pool.weight for pool in self.pools):
            raise ValueError("pools: all weights are 0, so that no row is asked: give one of them more")
        return self

    def pool_of(self, mean: float) -> int:
        """Find the pool of a row by its mean reward."""
        fits = (
            (pool.at_least is None or mean >= pool.at_least) and (pool.below is None or mean < pool.below)
            for pool in self.pools
        )
        return next(number for number, fit in enumerate(fits) if fit)
