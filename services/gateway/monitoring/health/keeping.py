"""Keeps what the training-health checks look at, so that a gateway that starts again goes on where it was.

What services report only grows while their sessions last, so nothing that they counted since the window was stored is
lost: their next report has it. The figures of steps since then are.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from flotilla.services.gateway.monitoring.health.measurements import Measurements
from flotilla.services.gateway.monitoring.health.window import HealthWindow
from flotilla.services.gateway.records.repository import Experiment, ExperimentRepository, PerExperiment
from flotilla.services.gateway.store.base import Store
from flotilla.services.gateway.store.transaction import Transaction
from flotilla.services.gateway.store.writes import PutWindow

HEALTH: Final = "health"


async def restore_windows(
    experiments: Iterable[Experiment], measurements: PerExperiment[Measurements], store: Store
) -> None:
    """Read what an earlier gateway kept of experiments that have not ended."""
    for experiment in experiments:
        if not experiment.state.is_final:
            kept = await store.window(experiment.id, HEALTH)
            is_same_start = kept.get("start") == experiment.record.start_number
            measurements.of(experiment).health.restore(kept.get("window", {}), is_same_start=is_same_start)


async def store_window(experiment: Experiment, repository: ExperimentRepository, window: HealthWindow) -> None:
    """Keep what was seen of an experiment, unless it was deleted meanwhile."""
    async with repository.transaction() as change:
        if repository.find(experiment.id) is experiment:
            stage_window(change, experiment, window.to_window())


def stage_window(change: Transaction, experiment: Experiment, described: Mapping[str, Any]) -> None:
    """Keep what ``HealthWindow.to_window`` described."""
    data = {"start": experiment.record.start_number, "window": dict(described)}
    change.write(PutWindow(experiment.id, HEALTH, data))
