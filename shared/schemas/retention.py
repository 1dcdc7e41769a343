"""How long is kept what finished experiments left, and what of it goes."""

from enum import StrEnum
from typing import Final

from pydantic import Field

from flotilla.shared.schemas.wire import TolerantWire, Wire

MAX_DAYS: Final = 36_500.0
Days = float | None


class Part(StrEnum):
    """What an experiment leaves; a run is all of it, with its record, series and events."""

    RUN = "run"
    CHECKPOINTS = "checkpoints"
    SAMPLES = "samples"
    LOGS = "logs"
    """Whatever else is in its directory: profiles, logs of engines, files of trackers."""


class Retention(Wire):
    """How long what a finished experiment left is kept, in days since it ended; null: for ever."""

    run_days: Days = Field(None, ge=0, le=MAX_DAYS)
    checkpoints_days: Days = Field(None, ge=0, le=MAX_DAYS)
    samples_days: Days = Field(None, ge=0, le=MAX_DAYS)
    logs_days: Days = Field(None, ge=0, le=MAX_DAYS)
    max_bytes: int | None = Field(None, ge=0)
    """What the files of all finished experiments may take; beyond it those of the one that ended first go, and so on.
    Their records, series and events stay. Null: no bound."""

    @property
    def is_set(self) -> bool:
        """Whether anything ever goes."""
        return any(value is not None for value in self.model_dump().values())

    def days_of(self, part: Part) -> Days:
        """Return how long a part is kept."""
        days: Days = getattr(self, f"{part}_days")
        return days


class PruneRequest(Retention):
    """What should go now; nothing given: what the gateway's own settings say."""

    dry_run: bool = True
    """Only report what would be deleted."""


class PrunedPart(TolerantWire):
    """A part that is deleted, or kept although its time is over."""

    experiment_id: str
    part: Part
    bytes: int
    """That its files free: what a fork has links to stays on the disk."""
    ended_at: str
    why: str
    """Why it is deleted; or what refers to it, or why it could not be deleted."""


class Pruning(TolerantWire):
    """The result of one pass over the data of finished experiments."""

    dry_run: bool
    removed: tuple[PrunedPart, ...]
    """Or would be, the experiment that ended last first."""
    kept: tuple[PrunedPart, ...]
    bytes: int
    """Sum over ``removed``."""
