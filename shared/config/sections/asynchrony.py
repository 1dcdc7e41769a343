"""How far generation may run ahead of training."""

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal

from pydantic import Field, model_validator

from flotilla.shared.config.base.model import Config
from flotilla.shared.config.sections.publication import PublicationConfig


class OnWeightUpdate(StrEnum):
    """What happens to samples in flight when a new version arrives."""

    DRAIN = "drain"
    INTERRUPT = "interrupt"
    CONTINUE = "continue"


class AsynchronyConfig(Config):
    """The admission budget and what it implies: R groups per step, T steps per version, and the surplus η.

    A step trains R = ``optimisation.groups_per_mini_batch * require_batches`` groups. The feeder issues a task only
    while ``outstanding + consumed since the last publication < R * T * (1 + η)``.

    Source: verl, fully asynchronous policy trainer (its ``async_training`` section).
    """

    trigger_parameter_sync_step: int = Field(1, ge=1)
    """T: steps (of R groups each) between two publications."""
    staleness_threshold: float = Field(0.5, ge=0)
    """η: how much more than one version's need may be outstanding, as a fraction. 0 is on-policy when T is 1."""
    require_batches: int = Field(1, ge=1)
    """Mini-batches of one step: the trainer collects them all, then makes one optimiser update for each."""
    on_weight_update: OnWeightUpdate = OnWeightUpdate.INTERRUPT
    """drain: samples in flight finish under the old weights; interrupt: they keep their tokens and continue under the
    new weights with a fresh prefix; continue: they continue at once and keep their KV cache. Left out, it is
    drain where staleness_threshold is 0, since nothing is in flight at an update then."""
    max_lag: int | None = Field(None, ge=0)
    """No token older than this many versions is ever trained. Null: the smallest bound that the budget can need,
    0 when η is 0, else ceil(η) + 1."""
    on_max_lag: Literal["pace", "drop"] = "pace"
    """pace: the trainer waits for old groups before it publishes a version that would make them too old;
    drop: it publishes and drops them, counted with their reason."""
    redundant_groups: int = Field(0, ge=0)
    """Issue groups beyond the budget while fewer than this many are being sampled and the budget's are not all
    finished. The first that are finished are trained. What a new version makes too old is ended: what is being sampled
    is aborted, what is finished is left out, each counted as dropped, `redundant`. 0: none. It needs on_max_lag
    drop."""
    publication: PublicationConfig = PublicationConfig()
    """How each version's weights travel."""

    @model_validator(mode="before")
    @classmethod
    def _drain_where_nothing_runs_ahead(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or "on_weight_update" in given or given.get("staleness_threshold") != 0:
            return given
        return {**given, "on_weight_update": OnWeightUpdate.DRAIN}

    @model_validator(mode="after")
    def _refuse_what_has_no_effect(self) -> "AsynchronyConfig":
        if self.max_lag == 0 and self.staleness_threshold > 0:
            raise ValueError(
                f"asynchrony.max_lag 0 would discard everything that asynchrony.staleness_threshold "
                f"{self.staleness_threshold} lets run ahead: set staleness_threshold to 0, or max_lag to at least 1"
            )
        if self.staleness_threshold == 0 and self.max_lag:
            raise ValueError(
                f"asynchrony.max_lag {self.max_lag} has no effect while asynchrony.staleness_threshold is 0, since "
                "nothing that is trained is older: raise staleness_threshold, or remove max_lag"
            )
        if self.redundant_groups and self.on_max_lag == "pace":
            raise ValueError(
                f"asynchrony.redundant_groups {self.redundant_groups} samples groups that are not all trained, and "
                "asynchrony.on_max_lag pace would wait for each of them: set on_max_lag to drop"
            )
        if self.staleness_threshold == 0 and self.on_max_lag != "pace" and not self.redundant_groups:
            raise ValueError(
                f"asynchrony.on_max_lag {self.on_max_lag} has no effect while asynchrony.staleness_threshold is 0, "
                "since nothing gets old: raise staleness_threshold, or remove on_max_lag"
            )
        if self.staleness_threshold == 0 and self.on_weight_update is not OnWeightUpdate.DRAIN:
            raise ValueError(
                f"asynchrony.on_weight_update {self.on_weight_update} has no effect while "
                "asynchrony.staleness_threshold is 0, since nothing is in flight at an update: set "
                "staleness_threshold above 0, or on_weight_update to drain"
            )
        return self

    @property
    def resolved_max_lag(self) -> int:
        """The bound in force, in versions."""
        if self.max_lag is not None:
            return self.max_lag
        return math.ceil(self.staleness_threshold) + 1 if self.staleness_threshold > 0 else 0

    def budget(self, groups_per_step: int) -> int:
        """Count the groups that may be outstanding or consumed since the last publication."""
        return int(groups_per_step * self.trigger_parameter_sync_step * (1 + self.staleness_threshold) + 1e-9)
