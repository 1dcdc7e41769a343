"""Keeps the index of an experiment's samples up to date, so that who looks at them does not wait for it."""

import asyncio
import logging
import sqlite3
from pathlib import Path

from flotilla.services.gateway.records.per_experiment import PerExperiment
from flotilla.services.gateway.records.repository import Experiment
from flotilla.services.gateway.samples.reads import SampleReads
from flotilla.shared.samples.index import SampleIndex

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
READ_SECONDS = 0.5
"""At a stretch: a query takes its turn in between."""


class SampleIndexes:
    """The index of each experiment, opened when it is first asked for, and those who read what it finds."""

    def __init__(self) -> None:
        self.reads = SampleReads()
        self._opened: PerExperiment[list[SampleIndex]] = PerExperiment(list)

    def of(self, experiment: Experiment) -> SampleIndex:
        """Find the index of an experiment."""
        opened = self._opened.of(experiment)
        if not opened:
            opened.append(SampleIndex(Path(experiment.record.directory)))
        return opened[0]

    async def follow(self, experiment: Experiment) -> None:
        """Read new files until cancelled."""
        index = self.of(experiment)
        while True:
            try:
                _, num_unread = await asyncio.to_thread(index.refresh, seconds=READ_SECONDS)
            except (OSError, sqlite3.Error) as error:
                facts = {"experiment_id": experiment.id, "error": repr(error)}
                log.warning("samples cannot be indexed", extra=facts)
                num_unread = 0
            await asyncio.sleep(LOOK_SECONDS if num_unread == 0 else 0.1)
