"""The parts of a gateway that its loop and the work for one experiment are made of."""

from dataclasses import dataclass

from flotilla.services.gateway.access.tokens import Tokens
from flotilla.services.gateway.datasets.held_out import HeldOutRows
from flotilla.services.gateway.events.log import EventLog
from flotilla.services.gateway.feeder.status import FeederStatus
from flotilla.services.gateway.lifecycle.commands import ExperimentCommands
from flotilla.services.gateway.membership.fleet import Fleet
from flotilla.services.gateway.monitoring.health.measurements import Measurements
from flotilla.services.gateway.publications.publications import Publications
from flotilla.services.gateway.records.per_experiment import PerExperiment
from flotilla.services.gateway.records.repository import ExperimentRepository
from flotilla.services.gateway.registry.services import Registry
from flotilla.services.gateway.samples.indexing import SampleIndexes
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.services.gateway.store.base import Store
from flotilla.shared.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayParts:
    """Made once by ``state.assemble``.

    Attributes:
        feeder_status: written by each experiment's feeder alone.
        measurements: of each experiment, from the watchdog and the trainer's metrics.
        samples: indexes of what each experiment's model wrote.
        held_out: rows of jobs on finished answers, while each experiment is at work.
    """

    settings: GatewaySettings
    store: Store
    clock: Clock
    registry: Registry
    repository: ExperimentRepository
    publications: Publications
    commands: ExperimentCommands
    fleet: Fleet
    events: EventLog
    tokens: Tokens
    feeder_status: PerExperiment[FeederStatus]
    measurements: PerExperiment[Measurements]
    samples: SampleIndexes
    held_out: PerExperiment[HeldOutRows]
