"""What is kept of what the model wrote."""

from pydantic import Field

from flotilla.shared.config.base.model import Config
from flotilla.shared.config.sections.resources import GIBIBYTE, MEBIBYTE


class SamplesConfig(Config):
    """Samples are kept in parquet files, in the folder `samples` beside the checkpoints, to be looked at and replayed.

    A group is kept whole: all of its answers. Writing never holds a step back: what comes faster than the disk takes
    it, or finds it full, is left out and counted.
    """

    groups_per_step: int | None = Field(None, ge=0)
    """Groups kept of each trained step, its first ones. Null: all, so that the step can be replayed."""
    ended_per_version: int = Field(8, ge=0)
    """Groups kept of those that were filtered or dropped, or failed: as many per policy version and reason, by each
    service that ends groups."""
    max_bytes: int = Field(2 * GIBIBYTE, ge=MEBIBYTE)
    """Bound on all files together. Beyond it the oldest file goes of the kind that takes most."""
    max_age_hours: float | None = Field(None, gt=0)
    """Files older than this are removed. Null: no bound."""
