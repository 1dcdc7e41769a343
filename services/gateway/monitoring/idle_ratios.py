"""Stores the idle ratio of each version as soon as a rollout has left the version."""

from flotilla.services.gateway.monitoring.idleness import Idleness
from flotilla.services.gateway.records.per_experiment import PerExperiment
from flotilla.services.gateway.records.repository import Experiment
from flotilla.services.gateway.records.versions import step_of
from flotilla.services.gateway.store.base import Store
from flotilla.services.gateway.store.writes import PutMetrics, PutWindow, Write
from flotilla.shared.clock import Clock, rfc3339
from flotilla.shared.schemas.experiment import MetricPoint
from flotilla.shared.schemas.service import ObservedState

IDLE_RATIO = "rollouter/idle_ratio"


class IdleRatios:
    """The idle times of all experiments' rollouts."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._idleness = PerExperiment(Idleness)

    async def record(self, experiment: Experiment, service_id: str, observed: ObservedState) -> None:
        """Record what a rollout reports; store the ratio of the version that it has just left, if there is one."""
        idleness = self._idleness.of(experiment)
        if not idleness.is_restored:
            idleness.restore(await self._store.window(experiment.id, IDLE_RATIO))
        before = idleness.num_changes
        found = idleness.record(service_id, observed.policy_version, observed.load)
        if idleness.num_changes == before:
            return
        window = PutWindow(experiment.id, IDLE_RATIO, idleness.to_window())
        writes: list[Write] = [window]
        if found is not None:
            version, ratio = found
            # The step with which the version ended: that of the one which the rollout serves now.
            step = await step_of(self._store, experiment.record, observed.policy_version or 0)
            at = rfc3339(self._clock.now())
            point = MetricPoint(name=IDLE_RATIO, step=step, version=version, value=ratio, at=at)
            writes.append(PutMetrics(experiment.id, [point]))
        async with self._store.transaction() as change:
            change.write(*writes)
