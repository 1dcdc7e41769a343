"""The parts of a gateway that its loop and the work for one experiment are made of."""

import asyncio
from typing import Final

from flotilla.services.gateway.access.tokens import Tokens
from flotilla.services.gateway.datasets.made import HeldOutRows
from flotilla.services.gateway.events.log import EventLog
from flotilla.services.gateway.feeder.status import FeederStatus
from flotilla.services.gateway.lifecycle.commands import ExperimentCommands
from flotilla.services.gateway.membership.fleet import Fleet
from flotilla.services.gateway.monitoring.health.measurements import Measurements
from flotilla.services.gateway.publications.publications import Publications
from flotilla.services.gateway.records.repository import (
    Experiment,
    ExperimentRepository,
    OpenPlane,
    PerExperiment,
    owner_of,
)
from flotilla.services.gateway.registry.services import Registry, wake_services
from flotilla.services.gateway.samples.indexing import SampleIndexes
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.services.gateway.store.base import Store
from flotilla.services.gateway.store.transaction import Transaction
from flotilla.shared.clock import Clock


class GatewayParts:
    """Made once, each of those before it; nothing is read or run yet.

    Args:
        settings: how this gateway is set.
        store: its database.
        open_plane: opens an experiment's data plane.
        clock: tells the time.

    Attributes:
        wake: set when placement or an experiment's life may have to move: the reconciler reconciles at once.
        feeder_status: written by each experiment's feeder alone.
        measurements: of each experiment, from the watchdog and the trainer's metrics.
        samples: indexes of what each experiment's model wrote.
        held_out: rows of jobs on finished answers, while each experiment is at work.
    """

    def __init__(self, settings: GatewaySettings, store: Store, open_plane: OpenPlane, clock: Clock) -> None:
        self.settings: Final = settings
        self.store: Final = store
        self.clock: Final = clock
        self.wake: Final = asyncio.Event()
        self.feeder_status: Final = PerExperiment(FeederStatus)
        self.measurements: Final = PerExperiment(Measurements)
        self.held_out: Final = PerExperiment(HeldOutRows)
        self.samples: Final = SampleIndexes()
        self.events: Final = EventLog(store, clock, settings.webhooks, settings.places.networks)
        self.tokens: Final = Tokens(store, clock, settings.token, settings.service_token, settings.quota)
        self.registry: Final = Registry(
            store,
            clock,
            lease_seconds=settings.lease_seconds,
            grace_seconds=settings.grace_seconds,
            rest_seconds=settings.rest_seconds,
        )
        self.repository: Final = ExperimentRepository(
            store, clock, open_plane, self.tokens.quota_of, on_change=self._experiment_changed
        )
        self.publications: Final = Publications(
            store, clock, self.registry, self.repository, self.events, phase_seconds=settings.publication_seconds
        )
        self.commands: Final = ExperimentCommands(
            self.repository,
            self.registry,
            self.publications,
            self.events,
            clock,
            settings.experiments,
            settings.places,
            on_restart=self._experiment_restarted,
        )
        self.fleet: Final = Fleet(
            self.registry,
            self.repository,
            self.publications,
            self.commands,
            self.events,
            clock,
            store,
            self.measurements,
            self.tokens,
            on_change=self.wake.set,
        )

    def owner_of(self, experiment_id: str) -> str | None:
        """Name whose an experiment is; None: nobody's in particular, or there is none."""
        return owner_of(self.repository, experiment_id)

    def _experiment_restarted(self, change: Transaction, experiment: Experiment) -> None:
        change.then(self.measurements.of(experiment).health.clear)
        self.fleet.returning.stage_forgetting(change, experiment.id)

    def _experiment_changed(self, experiment_id: str) -> None:
        wake_services(self.registry, experiment_id)
        self.wake.set()
