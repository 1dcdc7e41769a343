"""The parts of a gateway that its loop and the work for one experiment are made of."""

from dataclasses import dataclass

from services.gateway.access.tokens import Tokens
from services.gateway.datasets.held_out import HeldOutRows
from services.gateway.events.log import EventLog
from services.gateway.feeder.status import FeederStatus
from services.gateway.lifecycle.commands import ExperimentCommands
from services.gateway.membership.fleet import Fleet
from services.gateway.monitoring.measurements import Measurements
from services.gateway.publications.publications import Publications
from services.gateway.records.per_experiment import PerExperiment
from services.gateway.records.repository import ExperimentRepository
from services.gateway.registry.services import Registry
from services.gateway.samples.indexing import SampleIndexes
from services.gateway.settings import GatewaySettings
from services.gateway.store.base import Store
from shared.clock import Clock


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
