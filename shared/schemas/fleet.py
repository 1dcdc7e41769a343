"""Who serves whom, and why."""

from collections.abc import Mapping

from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.schemas.wire import TolerantWire


class KindShare(TolerantWire):
    """What an experiment has of one kind of service, and should have."""

    min: int
    """It starts with this many, and others never take these away."""
    max: int | None
    """It never gets more than this many; null: no bound."""
    share: int
    """What it should have now: its minimum and its part of the surplus; 0 while it cannot start."""
    services: tuple[str, ...]
    """Ids of those that work for it."""
    leaving: Mapping[str, str]
    """Those of them that were asked to leave, and why."""


class ExperimentShare(TolerantWire):
    """What an active experiment has of the fleet."""

    experiment_id: str
    name: str
    state: ExperimentState
    weight: float
    priority: int
    kinds: Mapping[str, KindShare]
    waiting: str | None
    """What it waits for, and who has it; null if it has all that it needs."""


class FleetView(TolerantWire):
    """The fleet by quota."""

    experiments: tuple[ExperimentShare, ...]
    """Active experiments, the earliest started first."""
    idle: Mapping[str, tuple[str, ...]]
    """Services without an experiment, by kind."""
