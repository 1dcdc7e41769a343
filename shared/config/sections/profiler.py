"""Which steps of the trainer, and which versions of the engine, are recorded operation by operation."""

from typing import Annotated

from pydantic import Field

from flotilla.shared.config.base.model import Config

Number = Annotated[int, Field(ge=0, lt=2**31)]


class ProfilerConfig(Config):
    """Chrome traces of torch's profiler, in the folder `profiles` beside the checkpoints; see docs/monitoring.md.

    Nothing is recorded unless a step or a version is named. All keys can change while the experiment runs.
    """

    steps: tuple[Annotated[int, Field(ge=1, lt=2**31)], ...] = Field((), max_length=64)
    """Steps of the trainer, each in a file of its own."""
    ranks: tuple[Number, ...] | None = Field((0,), max_length=64)
    """Ranks of the trainer that record them. Null: all."""
    engine_versions: tuple[Number, ...] = Field((), max_length=64)
    """Policy versions under which each rollout records its first steps; the embedded engine alone does."""
    engine_steps: int = Field(32, ge=1, le=128)
    """Steps of the engine that such a file has: each gives every running sample one token. Fewer where torch would take
    more than half a second to end the recording, in which the engine stands still."""
