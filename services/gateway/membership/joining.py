"""Registrations that wait for their turn are stored together: a thousand services that start are not a thousand writes.

The request that has the turn stages its own registration and those waiting behind it. They find themselves registered
in their own turn, or, where the database did not take them, stage themselves.

Services that were removed because they were silent may come back under their former identity. A host that cannot be
reached for half a minute has lost nothing. Its service registers again as the same process, gets the same id, and,
where nobody has taken its place, the same assignment: so it keeps worker, engine and weight endpoint. What it had
claimed was released meanwhile and is fenced; a trainer keeps its epoch, since no other one had it. The record of a
removed service stays in the database, so a gateway that restarts during the cut knows it as well.

The scheduler, which assigns all others, decides from what it saw before: ``num_assigned`` shows it that a service came
back meanwhile, and it decides again.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from flotilla.services.gateway.events.log import EventLog
from flotilla.services.gateway.monitoring.usage import machine_of
from flotilla.services.gateway.records.repository import ExperimentRepository
from flotilla.services.gateway.registry.services import LiveService, Registry, no_contact
from flotilla.services.gateway.store.base import Store
from flotilla.services.gateway.store.records import ServiceRecord
from flotilla.services.gateway.store.transaction import Transaction
from flotilla.services.gateway.store.writes import DeleteRecord, PutRecord
from flotilla.shared.clock import Clock
from flotilla.shared.errors import Conflict, Unavailable
from flotilla.shared.schemas.service import Registration, ServiceKind

REMEMBERED_SECONDS = 600.0
COMPUTING = frozenset({ServiceKind.TRAINER, ServiceKind.ROLLOUT})
"""Kinds of service whose devices are given with them."""


@dataclass(frozen=True, slots=True)
class CutOff:
    """A service at the moment when it was removed for its silence.

    Attributes:
        record: with what it was assigned to, and the epoch of that experiment's trainers then.
        heard_at: when it called last, by the registry's clock in seconds.
    """

    record: ServiceRecord
    heard_at: float


class Returning:
    """Remembers removed services by their incarnation, and lets them continue.

    Attributes:
        num_assigned: how many got their work back.
    """

    def __init__(
        self, registry: Registry, repository: ExperimentRepository, events: EventLog, store: Store, clock: Clock
    ) -> None:
        self._registry, self._repository, self._events = registry, repository, events
        self._store, self._clock = store, clock
        self._cut_off: dict[str, CutOff] = {}
        self.num_assigned = 0

    async def load(self) -> None:
        """Read the services that an earlier process removed; their silence continued while no gateway ran."""
        for record in await self._store.services():
            if record.silent_since is not None:
                silent = max(0.0, self._clock.now() - record.silent_since)
                self._cut_off[record.incarnation] = CutOff(record, self._clock.monotonic() - silent)

    def silence_of(self, service: LiveService) -> str:
        """Record for how long a member has been silent."""
        return no_contact(service.record, self._registry.now() - service.heard_at)

    def stage_memory(self, change: Transaction, service: LiveService) -> None:
        """Remember a removed service, once its departure is staged."""
        experiment = self._repository.find(service.experiment_id)
        now = self._registry.now()
        since = self._clock.now() - (now - service.heard_at)
        epoch = None if experiment is None else experiment.record.trainer_epoch
        record = replace(service.record, silent_since=since, trainer_epoch=epoch)
        self._stage_forgetting(change, lambda each: now >= each.heard_at + REMEMBERED_SECONDS)
        cut_off = CutOff(record, service.heard_at)
        change.write(PutRecord(record))
        change.then(lambda: self._cut_off.update({record.incarnation: cut_off}))

    def stage_forgetting(self, change: Transaction, experiment_id: str) -> None:
        """Forget all for an experiment that has ended and starts again from its newest checkpoint."""
        self._stage_forgetting(change, lambda each: each.record.experiment_id == experiment_id)

    def _stage_forgetting(self, change: Transaction, is_meant: Callable[[CutOff], bool]) -> None:
        found = {name: each.record.id for name, each in self._cut_off.items() if is_meant(each)}
        # A service that has come back has its record again, under the same id.
        change.write(*(DeleteRecord(ServiceRecord, each) for each in found.values() if not self._registry.find(each)))
        change.then(lambda: [self._cut_off.pop(name, None) for name in found])

    def why_missing(self, experiment_id: str) -> str | None:
        """Name the hosts of an experiment's services that are out of reach, and for how long; None: there are none."""
        return "; ".join(words for record, words in self.away() if record.experiment_id == experiment_id) or None

    def away(self) -> list[tuple[ServiceRecord, str]]:
        """List the removed services that are remembered, and for how long each has been silent."""
        now = self._registry.now()
        return [
            (each.record, no_contact(each.record, now - each.heard_at))
            for each in self._cut_off.values()
            if now < each.heard_at + REMEMBERED_SECONDS
        ]

    def knows(self, registration: Registration) -> bool:
        """Whether a process was removed or is a member: what it may have depends on what all others have now."""
        name = registration.incarnation
        return name in self._registry.by_incarnation or name in self._cut_off

    def stage_registration(self, change: Transaction, registration: Registration) -> LiveService:
        """Add a service; one that was out of reach gets back its id, and its assignment if that is still free.

        Raises:
            Conflict: a service of another kind has this incarnation.
        """
        found = self._cut_off.get(registration.incarnation)
        is_old = found is not None and self._registry.now() > found.heard_at + REMEMBERED_SECONDS
        if found is None or is_old or found.record.kind != registration.kind:
            return self._registry.stage_registration(change, registration)
        service = self._registry.stage_registration(change, registration, found.record)
        change.then(lambda: self._cut_off.pop(registration.incarnation, None))
        if found.record.experiment_id is not None and self._is_free(service, found):
            self._registry.stage_assignment(change, service, found.record.experiment_id)
            change.then(self._count)
            self._events.stage(
                change,
                found.record.experiment_id,
                "service_assigned",
                service_id=service.id,
                service_kind=service.kind.value,
                returns=True,
                **machine_of(service, self._repository.get(found.record.experiment_id).spec),
            )
        return service

    def _is_free(self, service: LiveService, found: CutOff) -> bool:
        """Whether its place is still free, so that it may continue as if it had never been away."""
        experiment = self._repository.find(found.record.experiment_id)
        if experiment is None or not experiment.is_active or found.record.is_draining:
            return False
        if service.kind in experiment.steering.hearers and not service.capabilities.live_changes:
            return False  # the experiment was changed meanwhile, and an earlier release would not hear of it
        if service.kind is ServiceKind.TRAINER:
            # Another trainer has had a later epoch, or this one's job has ended: then it begins again.
            is_last = found.record.trainer_epoch == experiment.record.trainer_epoch
            if not is_last or self._registry.trainer_of(experiment.id) is not None:
                return False
        if service.kind not in COMPUTING:
            return True
        return not any(each.devices & service.devices for each in self._registry if _computes(each, experiment.id))

    def _count(self) -> None:
        self.num_assigned += 1


def _computes(service: LiveService, experiment_id: str) -> bool:
    """Whether a service may compute on its devices for others: it works for them, or has not released them yet."""
    if service.kind not in COMPUTING or service.experiment_id is not None:
        return service.kind in COMPUTING and service.experiment_id != experiment_id
    return service.is_busy


MOST_TOGETHER = 64
REPLACED = "another process was started in its place"


@dataclass(eq=False, slots=True)
class _Waiting:
    """A registration that is not stored yet.

    Attributes:
        service_id: once it is staged.
        refused: why it was not.
        is_alone: whether the database refused it together with others, so that it is stored without them.
    """

    registration: Registration
    service_id: str | None = None
    refused: Conflict | None = None
    is_alone: bool = False

    @property
    def names(self) -> frozenset[str]:
        """What no two live services have alike: the process, and the address."""
        of = self.registration
        return frozenset({of.incarnation, f"{of.kind} {of.host} {of.address}"})


class Joining:
    """Registers services.

    Args:
        stage_leave: forgets a service, for a reason.

    Attributes:
        returning: removed services that may come back.
    """

    def __init__(
        self,
        registry: Registry,
        repository: ExperimentRepository,
        events: EventLog,
        store: Store,
        clock: Clock,
        stage_leave: Callable[[Transaction, str, str], None],
    ) -> None:
        self._registry = registry
        self.returning = Returning(registry, repository, events, store, clock)
        self._store = store
        self._stage_leave = stage_leave
        # In the order in which they came.
        self._waiting: dict[_Waiting, None] = {}

    async def join(self, registration: Registration) -> LiveService:
        """Add a service; the same process gets the same id again.

        Raises:
            Conflict: a service of another kind has this incarnation.
        """
        own = _Waiting(registration)
        self._waiting[own] = None
        try:
            await self._in_turn(own)
        finally:
            self._waiting.pop(own, None)
        if own.refused is not None:
            raise own.refused
        return self._registry.get(own.service_id or "")

    async def _in_turn(self, own: _Waiting) -> None:
        """Store it, with others that wait; what is wrong with one of them then keeps none of the others out."""
        together = [own]
        try:
            async with self._store.transaction() as change:
                if own.refused is None and self._registry.find(own.service_id) is None:
                    together = self._stage(change, own)
        except Unavailable:
            raise
        except Exception:
            if len(together) == 1:
                raise
            for each in together:
                each.is_alone = True
            await self._in_turn(own)

    def _stage(self, change: Transaction, first: _Waiting) -> list[_Waiting]:
        together, names = [first], set(first.names)
        for each in self._waiting:
            if len(together) == MOST_TOGETHER or first.is_alone:
                break
            # What a process that is known may have depends on what all others have now: it takes its own turn.
            if names.isdisjoint(each.names) and not self.returning.knows(each.registration):
                together.append(each)
                names |= each.names
        for each in together:
            self._waiting.pop(each, None)
            try:
                service = self.returning.stage_registration(change, each.registration)
            except Conflict as error:
                each.refused = error
                continue
            each.service_id = service.id
            for dead in self._registry.superseded_by(change.staged(service, service.record)):
                self._stage_leave(change, dead.id, REPLACED)
        return together
