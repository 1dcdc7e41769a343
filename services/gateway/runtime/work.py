"""What the gateway does for one experiment, as one task: feed, watch and evaluate it; in the end, bring it to rest."""

import asyncio
import functools
import threading

from services.gateway import signals
from services.gateway.datasets.dataset import Dataset
from services.gateway.datasets.overlong import without_overlong
from services.gateway.evaluation.evaluator import Evaluator
from services.gateway.events.log import EventLog
from services.gateway.feeder.feeder import Feeder
from services.gateway.lifecycle.commands import ExperimentCommands
from services.gateway.membership.fleet import Fleet
from services.gateway.monitoring.watchdog import Watchdog
from services.gateway.preflight import checks
from services.gateway.publications.publications import Publications
from services.gateway.records.repository import Experiment, ExperimentRepository
from services.gateway.registry.services import Registry
from services.gateway.runtime.orphaned_claims import OrphanedClaims
from services.gateway.runtime.teardown import Teardown
from services.gateway.settings import GatewaySettings
from services.gateway.store.base import Store
from services.gateway.tracking.tracking import Tracking
from shared.clock import Clock


class ExperimentWork:
    """Runs the parts that every experiment has of its own."""

    def __init__(
        self,
        settings: GatewaySettings,
        store: Store,
        clock: Clock,
        registry: Registry,
        repository: ExperimentRepository,
        publications: Publications,
        commands: ExperimentCommands,
        fleet: Fleet,
        events: EventLog,
    ) -> None:
        self._settings = settings
        self._store = store
        self._clock = clock
        self._registry = registry
        self._repository = repository
        self._publications = publications
        self._commands = commands
        self._fleet = fleet
        self._events = events
        self._tracking = Tracking(store, events)

    async def run(self, experiment: Experiment) -> None:
        """Feed, watch, evaluate and track an experiment until cancelled.

        Raises:
            DataError: a dataset cannot be read (any more), or all its prompts are too long.
        """
        dataset, held_out = await self._load(experiment)
        watchdog = Watchdog(
            experiment,
            self._repository,
            self._registry,
            self._publications,
            self._events,
            self._clock,
            stall_seconds=self._settings.stall_seconds,
        )
        lanes = [
            Feeder(experiment, dataset, self._store, self._clock).run(),
            watchdog.run(),
            OrphanedClaims(experiment, self._registry, self._events).run(),
            self._tracking.run(experiment),
        ]
        if held_out is not None:
            lanes.append(
                Evaluator(experiment, held_out, self._repository, self._store, self._events, self._clock).run()
            )
        await signals.run_together(*map(asyncio.create_task, lanes))

    async def _load(self, experiment: Experiment) -> tuple[Dataset, Dataset | None]:
        """Load the datasets, without the rows that are too long."""
        spec, stop = experiment.spec, threading.Event()
        dataset = await asyncio.to_thread(checks.train_dataset, spec)
        held_out = await asyncio.to_thread(checks.evaluation_dataset, spec)
        found: list[Dataset] = []
        try:
            for what, each in (("training", dataset), ("held-out", held_out)):
                if each is not None:
                    filtered = await asyncio.to_thread(without_overlong, each, spec, what, stop=stop)
                    found.append(filtered.dataset)
                    if filtered.num_dropped:
                        facts = {"num_rows": filtered.num_rows, "num_dropped": filtered.num_dropped}
                        await self._events.append(experiment.id, "prompts_filtered", dataset=what, **facts)
        finally:
            stop.set()
        return found[0], found[1] if held_out is not None else None

    async def end(self, experiment: Experiment) -> None:
        """Bring an experiment to rest."""
        ending = Teardown(
            experiment,
            self._repository,
            self._registry,
            self._fleet,
            self._commands,
            self._clock,
            patience_seconds=self._settings.ending_seconds,
            finish_tracking=functools.partial(self._tracking.finish, experiment),
        )
        await ending.run()
