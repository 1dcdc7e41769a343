"""Experiments as the control plane shows them."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from pydantic import Field

from shared.schemas.wire import Wire


class ExperimentState(StrEnum):
    """``draft -> starting -> running <-> paused -> stopping -> stopped | completed``, or failed: resumable."""

    DRAFT = "draft"
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"
    STOPPED = "stopped"
    COMPLETED = "completed"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        """Whether nothing happens in this state any more, unless somebody resumes what failed."""
        return self in {ExperimentState.STOPPED, ExperimentState.COMPLETED, ExperimentState.FAILED}


class Problem(Wire):
    """The component and the cause of a failure or of a stall."""

    component: str
    cause: str
    at: str


class ExperimentView(Wire):
    """An experiment and where it stands."""

    id: str
    name: str
    state: ExperimentState
    revision: int
    spec: Mapping[str, Any]
    created_at: str
    updated_at: str
    step: int
    total_steps: int
    policy_version: int
    services: Mapping[str, tuple[str, ...]]
    """Ids of the services that work for it, by kind."""
    problem: Problem | None = None
    """Set in state failed, and while something stalls."""
    directory: str


class Page(Wire):
    """One page of a list; ``next`` is the cursor of the following one, or None."""

    items: tuple[Mapping[str, Any], ...]
    next: str | None = None


class MetricPoint(Wire):
    """One value of one series."""

    name: str
    step: int
    version: int
    value: float
    at: str | None = None


class MetricBatch(Wire):
    """What a service reports about one step; the gateway stores each step of a series once."""

    step: int = Field(ge=0)
    version: int = Field(ge=0)
    values: Mapping[str, float]


class Event(Wire):
    """Something that happened to an experiment; ``id`` grows and is the ``Last-Event-ID`` of the event stream."""

    id: int
    type: str
    at: str
    data: Mapping[str, Any]


class CheckpointView(Wire):
    """A durable checkpoint."""

    step: int
    version: int
    path: str
    at: str


class DiagnosisView(Wire):
    """What bounds the speed of an experiment, seen over a recent window; see docs/metrics.md."""

    component: str
    """generation, reward, trainer, admission, publication, redis or evaluation; or none."""
    cause: str
    advice: str
    """Which setting or service would change it."""
    window_seconds: float
    """How far back the evidence reaches."""
    evidence: Mapping[str, float]
    """Shares of time between 0 and 1, round trips in seconds, depths in groups."""
    problem: Problem | None = None
    """A stall or failure, which comes before any question of speed."""
