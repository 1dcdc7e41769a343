"""The exporters of all experiments: made when one begins to work, kept over pauses, finished when it comes to rest."""

import asyncio
import functools
from pathlib import Path

from flotilla.services.gateway import signals
from flotilla.services.gateway.events.log import EventLog
from flotilla.services.gateway.records.repository import Experiment, document_of
from flotilla.services.gateway.store.base import Store
from flotilla.services.gateway.tracking.base import TrackedRun
from flotilla.services.gateway.tracking.exporter import Exporter
from flotilla.services.gateway.tracking.opening import open_tracker
from flotilla.shared.config.redaction import redacted


class Tracking:
    """Keeps one exporter per tracker of an experiment."""

    def __init__(self, store: Store, events: EventLog) -> None:
        self._store = store
        self._events = events
        self._exporters: dict[str, tuple[Exporter, ...]] = {}

    async def run(self, experiment: Experiment) -> None:
        """Feed the trackers until cancelled; returns at once if there is none."""
        if exporters := self._of(experiment):
            await signals.run_together(*(asyncio.create_task(each.run(), name="exporter") for each in exporters))

    async def finish(self, experiment: Experiment) -> None:
        """Send what is left, and close; within a deadline, whatever the trackers do."""
        exporters = self._of(experiment)
        del self._exporters[experiment.id]
        await asyncio.gather(*(exporter.finish() for exporter in exporters))

    def _of(self, experiment: Experiment) -> tuple[Exporter, ...]:
        if experiment.id not in self._exporters:
            record = experiment.record
            run = TrackedRun(experiment.id, record.name, Path(record.directory), redacted(document_of(record)))
            self._exporters[experiment.id] = tuple(
                Exporter(config.kind, run, self._store, self._events, functools.partial(open_tracker, config, run))
                for config in experiment.spec.tracking.trackers
            )
        return self._exporters[experiment.id]
