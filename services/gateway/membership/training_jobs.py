"""Training jobs on several hosts: which service is which node, and the end of jobs that cannot continue.

Training jobs on several hosts: which service is which node, and when a job is over. Pure.

The trainer epoch is the membership: a job begins when as many services as nodes have the same epoch, and whatever ends
it anywhere raises the epoch, so that all its services end it and begin the next one. Node numbers follow the order of
registration, which a gateway that restarts finds again.
"""

from collections.abc import Mapping, Sequence

from flotilla.services.gateway.events.log import EventLog
from flotilla.services.gateway.records.repository import Experiment, ExperimentRepository, PerExperiment
from flotilla.services.gateway.registry.services import LiveService, Registry
from flotilla.services.gateway.store.transaction import Transaction
from flotilla.shared.schemas.service import JobNode, JobReport, ServiceKind

STORE_SECONDS = 120.0
"""Within which the first node has opened the job's store, once all services are there; it sees to the others itself."""

Reports = Mapping[str, JobReport | None]
"""By id of the experiment's trainer services, the first node first; None for one that reports no job."""


def node_of(service_id: str, num_nodes: int, epoch: int, reports: Reports) -> JobNode | None:
    """Find a service's place in the job of an epoch; None while there are too few services for it."""
    members = list(reports)[:num_nodes]
    if len(members) < num_nodes or service_id not in members:
        return None
    rank, first = members.index(service_id), reports[members[0]]
    if rank == 0 or first is None or first.epoch != epoch:
        return JobNode(rank=rank, count=num_nodes)
    return JobNode(rank=rank, count=num_nodes, host=first.host, port=first.port)


def why_ended(epoch: int, reports: Reports) -> str | None:
    """Return why the job of an epoch ended on one of its nodes; None while it has not."""
    causes = [each.ended for each in reports.values() if each is not None and each.epoch == epoch and each.ended]
    return causes[0] if causes else None


def name_of(service_id: str, members: Sequence[str], num_nodes: int) -> str:
    """Name a node to a person."""
    return f"node {members.index(service_id) + 1} of {num_nodes} (service {service_id})"


class _Awaited:
    """Since when the job of an epoch has had all its services and no store."""

    def __init__(self) -> None:
        self.epoch: int | None = None
        self.since = 0.0


class TrainingJobs:
    """Asks nothing of an experiment whose ranks are all on one host."""

    def __init__(self, registry: Registry, repository: ExperimentRepository, events: EventLog) -> None:
        self._registry, self._repository, self._events = registry, repository, events
        self._awaited = PerExperiment(_Awaited)

    def place_of(self, service: LiveService, experiment: Experiment) -> JobNode | None:
        """Find a service's place in its experiment's job."""
        num_nodes = experiment.spec.parallelism.nodes
        if service.kind is not ServiceKind.TRAINER or num_nodes == 1:
            return None
        return node_of(service.id, num_nodes, experiment.record.trainer_epoch, self._reports(experiment))

    def stage_departure(self, change: Transaction, service: LiveService, experiment: Experiment, reason: str) -> None:
        """End the job that a service was a node of: the others begin the next one when there are enough."""
        num_nodes = experiment.spec.parallelism.nodes
        members = list(self._reports(experiment))
        is_node = num_nodes > 1 and len(members) >= num_nodes and service.id in members
        if is_node and experiment.is_active:
            named = name_of(service.id, members, num_nodes)
            self._stage_next_epoch(change, experiment, f"{named} on {service.record.host} is gone: {reason}")

    async def reconcile(self, experiment: Experiment) -> None:
        """Begin the next epoch where the job has ended on a node, or does not start."""
        if experiment.spec.parallelism.nodes == 1 or not experiment.is_active:
            return
        epoch, cause = experiment.record.trainer_epoch, self._why_over(experiment)
        if cause is None:
            return
        async with self._repository.transaction() as change:
            # Asked again: it may have ended, or another epoch begun, while this waited for its turn.
            if experiment.is_active and experiment.record.trainer_epoch == epoch:
                self._stage_next_epoch(change, experiment, cause)

    def _why_over(self, experiment: Experiment) -> str | None:
        num_nodes, epoch = experiment.spec.parallelism.nodes, experiment.record.trainer_epoch
        reports = self._reports(experiment)
        ended = why_ended(epoch, reports)
        if ended is not None or len(reports) < num_nodes:
            return ended
        first, awaited, now = next(iter(reports)), self._awaited.of(experiment), self._registry.now()
        told = reports[first]
        if awaited.epoch != epoch or (told is not None and told.epoch == epoch and told.port is not None):
            awaited.epoch, awaited.since = epoch, now
        if now - awaited.since < STORE_SECONDS:
            return None
        named = name_of(first, list(reports), num_nodes)
        return f"{named} did not open the store of the training job within {STORE_SECONDS:g} s"

    def _stage_next_epoch(self, change: Transaction, experiment: Experiment, cause: str) -> None:
        epoch = experiment.record.trainer_epoch
        self._repository.stage(change, experiment, trainer_epoch=epoch + 1)
        self._events.stage(change, experiment.id, "training_job_ended", epoch=epoch, cause=cause)

    def _reports(self, experiment: Experiment) -> Reports:
        return {trainer.id: trainer.observed.job for trainer in self._registry.trainers_of(experiment.id)}
