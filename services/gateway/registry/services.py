"""The services that are members of the fleet, each under a lease.

A lease is renewed by every status call and lasts through the call's wait. A caller whose connection broke while it
waited keeps a short rest of it, long enough to call again. A rollout has no more than that between two calls either:
while it is silent its experiment's next version waits for it, and one that was given up too early only registers again.

The silence of a host is named by the address that others reach it at, and in few steps of time.
"""

import hashlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from ipaddress import ip_address
from urllib.parse import urlsplit

from flotilla.services.gateway.registry.desired import ServiceFacts
from flotilla.services.gateway.signals import Signal, fire_in_turn
from flotilla.services.gateway.store.base import Store
from flotilla.services.gateway.store.records import ServiceRecord
from flotilla.services.gateway.store.transaction import Transaction
from flotilla.services.gateway.store.writes import DeleteRecord, PutRecord
from flotilla.shared.clock import Clock, rfc3339
from flotilla.shared.errors import Conflict, NotFound
from flotilla.shared.schemas.checks import CheckOrder
from flotilla.shared.schemas.engine import with_adapters
from flotilla.shared.schemas.service import (
    DRAIN_NOTICE_SECONDS,
    Capabilities,
    DeviceReport,
    ObservedState,
    Registration,
    ServiceKind,
    ServiceView,
    WorkState,
)
from flotilla.shared.streams.hop import holder_name

DRAINED = "it was drained"
Place = tuple[str, str, str]
"""Kind, host and address: no two live processes have the same."""
OVERDUE_SECONDS = 10.0
"""How long after its notice a service that still works is released all the same: its claims end with their leases."""


@dataclass(frozen=True, slots=True)
class Notice:
    """That a service was asked to leave its experiment, or the fleet: why, and how long it may take."""

    reason: str
    ends_at: float
    """On the monotonic clock, in seconds."""
    until: float
    """The same by the wall clock, in seconds since the epoch: names the end alike in every process."""


class LiveService:
    """A service and what the gateway knows of it now.

    Attributes:
        engines: kinds of engines that it can start.
        devices: identities of the GPUs that it may use.
        heard_at: when it called last, by the registry's clock in seconds.
        pushes: how many of its reports are being handled.
        told: tag of the state last sent in answer to a report, since its present poll began.
        is_held: whether its poll waits for the answer to a report.
        is_cut_off: the connection of its waiting call broke, and it has not called since: its process may be dead.
        released_from: the experiment that it was assigned to last, whose devices it may still hold.
        is_restored: it registered with an earlier process, so where it was released from is not known.
        leaving: set while it is asked to leave its experiment, which is not for good: it will get another.
        check: what it should try while the fleet is examined.
        drained: set once it is asked to leave the fleet; a gateway that restarts finds it in the record.
        position: a number of 64 bits made of its id, by which others choose it.
    """

    def __init__(self, record: ServiceRecord, lease_ends: float, heard_at: float) -> None:
        self.record = record
        self.kind = ServiceKind(record.kind)
        self.can_do(Capabilities.model_validate(record.capabilities))
        self.observed = ObservedState()
        self.is_observed = False
        self.lease_ends = lease_ends
        self.heard_at = heard_at
        self.polls = 0
        self.pushes = 0
        self.told: str | None = None
        self.is_held = False
        self.is_cut_off = False
        self.changed = Signal()
        self.released_from: str | None = None
        self.is_restored = False
        self.leaving: Notice | None = None
        self.drained: Notice | None = None
        self.check: CheckOrder | None = None
        self.position = int.from_bytes(hashlib.sha256(record.id.encode()).digest()[:8])

    def can_do(self, capabilities: Capabilities) -> None:
        """Record its capabilities."""
        self.capabilities = capabilities
        startable = [offer for offer in capabilities.engines if offer.can_start]
        adapting = [offer for offer in startable if offer.takes_adapters]
        self.engines = frozenset(each.kind for each in startable) | {with_adapters(each.kind) for each in adapting}
        self.devices = capabilities.device_ids(self.record.host)

    @property
    def id(self) -> str:
        """Its id."""
        return self.record.id

    @property
    def holder(self) -> str:
        """What its claims in the data plane are named after."""
        return holder_name(self.record.kind, self.record.pid, self.record.incarnation)

    @property
    def experiment_id(self) -> str | None:
        """What it is assigned to."""
        return self.record.experiment_id

    @property
    def is_lent(self) -> bool:
        """Whether it is a rollout that computes on a trainer's devices, while these are lent."""
        return self.kind is ServiceKind.ROLLOUT and self.capabilities.is_lent

    def works_for(self, experiment_id: str) -> bool:
        """Whether it reports that it works for this experiment, whatever it is assigned to."""
        is_at_rest = self.observed.state in {WorkState.IDLE, WorkState.FINISHED, WorkState.FAILED}
        return self.observed.experiment_id == experiment_id and not is_at_rest

    @property
    def is_busy(self) -> bool:
        """Whether it has no experiment any more, but is not yet done with the one it had."""
        is_idle = self.observed.state is WorkState.IDLE or self.observed.experiment_id is None
        return self.experiment_id is None and not is_idle

    def facts(self, now: float) -> ServiceFacts:
        """What matters for its desired state, ``now`` by the registry's clock."""
        notices = [notice for notice in (self.leaving, self.drained) if notice is not None]
        if not notices:
            return ServiceFacts(self.id, self.kind, self.is_draining, is_lent=self.is_lent)
        first = min(notices, key=lambda notice: notice.ends_at)
        left = max(0.0, first.ends_at - now)
        return ServiceFacts(self.id, self.kind, self.is_draining, first.until, left, is_lent=self.is_lent)

    @property
    def is_draining(self) -> bool:
        """Whether it takes nothing new: it leaves its experiment, or the fleet."""
        return self.record.is_draining or self.leaving is not None


class Registry:
    """Registers services, keeps their leases and assignments.

    Args:
        lease_seconds: how long a service may be silent.
        grace_seconds: the first lease after a restart of the gateway.
        rest_seconds: what remains of a lease when the connection of a waiting call breaks.

    Attributes:
        by_incarnation: the live service of each process; only the registry writes it.
    """

    def __init__(
        self, store: Store, clock: Clock, *, lease_seconds: float, grace_seconds: float, rest_seconds: float
    ) -> None:
        self._store = store
        self._clock = clock
        self.lease_seconds = lease_seconds
        self._grace_seconds = grace_seconds
        self._rest_seconds = rest_seconds
        self._services: dict[str, LiveService] = {}
        self.by_incarnation: dict[str, LiveService] = {}
        self._places: dict[Place, dict[str, LiveService]] = {}
        self._last_number = 0
        self._assigned: dict[str, dict[str, LiveService]] = {}
        # Asked for with every status call of a fleet that may have a thousand services.
        self._trainers: dict[str, dict[str, LiveService]] = {}

    async def load(self) -> None:
        """Load the services of an earlier process, under a grace lease; a notice continues while no gateway runs."""
        records, now = await self._store.services(), self._clock.monotonic()
        for record in records:
            self._last_number = max(self._last_number, record.number)
            if record.silent_since is not None:
                continue
            service = LiveService(record, now + self._grace_seconds, now)
            self._remember(service)
            service.is_restored = True
            self._index(service)
            if record.is_draining:
                # A record of before there was an end in it: what is usual, from now on.
                ends = record.notice_ends_at
                left = DRAIN_NOTICE_SECONDS if ends is None else max(0.0, ends - self._clock.now())
                service.drained = replace(self.notice(DRAINED, left), until=ends or 0.0)

    def __iter__(self) -> Iterator[LiveService]:
        return iter(list(self._services.values()))

    def __len__(self) -> int:
        return len(self._services)

    def get(self, service_id: str) -> LiveService:
        """Find a live service.

        Raises:
            NotFound: there is no such service: it should register again.
        """
        if service_id not in self._services:
            raise NotFound(
                f"no service {service_id} is registered: one that works registers again", service_id=service_id
            )
        return self._services[service_id]

    def find(self, service_id: str | None) -> LiveService | None:
        """Find a live service, or None."""
        return self._services.get(service_id) if service_id is not None else None

    def of(self, experiment_id: str, kind: ServiceKind | None = None) -> list[LiveService]:
        """List the services that are assigned to an experiment, in the order of assignment."""
        services = self._assigned.get(experiment_id, {}).values()
        return [service for service in services if kind is None or service.kind is kind]

    def device_reports(
        self, experiment_id: str, kind: ServiceKind, *, is_lending: bool = False
    ) -> dict[str, DeviceReport | None]:
        """Return what the services of a kind have on the experiment's shared devices, by service id.

        Those that were released and have not yet closed their session are among them; the claims of other services are
        ignored.

        Args:
            experiment_id: whose devices.
            kind: of service.
            is_lending: of rollouts the lent ones alone are on them.
        """
        sharers = self.of(experiment_id, kind)
        if is_lending and kind is ServiceKind.ROLLOUT:
            sharers = [each for each in sharers if each.is_lent]
        reports = {each.id: each.observed.device for each in sharers}
        for each in self:
            held = each.observed.device
            is_former = each.kind is kind and (each.is_restored or each.released_from == experiment_id)
            if is_former and held is not None and held.is_held and each.observed.experiment_id == experiment_id:
                reports[each.id] = held
        return reports

    def trainers_of(self, experiment_id: str) -> list[LiveService]:
        """List the trainer services of an experiment as the nodes of its job: in the order of registration."""
        found = list(self._trainers.get(experiment_id, {}).values())
        return found if len(found) < 2 else sorted(found, key=lambda service: service.record.number)

    def trainer_of(self, experiment_id: str) -> LiveService | None:
        """Find the trainer service of an experiment; of several nodes the first, which leads."""
        return next(iter(self.trainers_of(experiment_id)), None)

    def superseded_by(self, record: ServiceRecord) -> list[LiveService]:
        """List those whose address another process has now, and which are silent: they are dead.

        The address is what the other process says. One that still waits for an answer, or has called since its
        connection broke, is there, and keeps its lease.
        """
        if _is_unspecified(record.address):
            return []
        now = self._clock.monotonic()
        same = [service for service in self._places.get(_place_of(record), {}).values() if service.id != record.id]
        return [service for service in same if service.is_cut_off or service.lease_ends <= now]

    def stage_registration(
        self, change: Transaction, registration: Registration, former: ServiceRecord | None = None
    ) -> LiveService:
        """Add a service; the same process gets the same id again.

        Args:
            change: what it is part of.
            registration: how it presents itself.
            former: its record before it was removed because it was silent.

        Raises:
            Conflict: a service of another kind has this incarnation.
        """
        known = self.by_incarnation.get(registration.incarnation)
        if known is not None and known.kind is not registration.kind:
            raise Conflict("a service of another kind has this incarnation: each process makes one of its own")
        fields = registration.model_dump(mode="json")
        number, now = 1 + change.staged(self, self._last_number), self._clock.monotonic()
        if known is not None:
            record = replace(known.record, **fields)
        elif former is not None:
            # Its number may be another's by now: nodes of a training job have their order from it.
            is_taken = any(each.record.number == former.number for each in self)
            number = number if is_taken else former.number
            record = replace(former, **fields, number=number, experiment_id=None, silent_since=None, trainer_epoch=None)
        else:
            service_id = f"{registration.kind}-{secrets.token_hex(4)}"
            record = ServiceRecord(id=service_id, registered_at=self._clock.now(), number=number, **fields)
        service = known or LiveService(record, now + self.lease_seconds, now)

        def follow() -> None:
            self._unplace(service)
            service.record = record
            service.can_do(registration.capabilities)
            self.renew(service)
            self._remember(service)
            self._last_number = max(self._last_number, record.number)

        change.stage(self, max(number - 1, record.number))
        change.stage(service, record)
        change.write(PutRecord(record))
        change.then(follow)
        return service

    def renew(self, service: LiveService, wait_seconds: float = 0.0) -> None:
        """Renew its lease, which lasts through a wait."""
        service.is_cut_off = False
        service.heard_at = self._clock.monotonic()
        service.lease_ends = max(
            service.lease_ends if wait_seconds == 0 else 0.0,
            self._clock.monotonic() + wait_seconds + self._silence(service),
        )

    def settle(self, service: LiveService) -> None:
        """End the lease's extension for a wait that is over; that it was answered does not prove who received it."""
        service.lease_ends = self._clock.monotonic() + self._silence(service)

    def _silence(self, service: LiveService) -> float:
        """How long it may take from one call to the next."""
        is_rollout = service.kind is ServiceKind.ROLLOUT
        return min(self._rest_seconds, self.lease_seconds) if is_rollout else self.lease_seconds

    def shorten(self, service: LiveService) -> None:
        """Leave it a short rest of its lease: the connection of its waiting call broke."""
        service.is_cut_off = True
        service.lease_ends = min(service.lease_ends, self._clock.monotonic() + self._rest_seconds)

    def now(self) -> float:
        """Read the clock that leases are measured with, in seconds."""
        return self._clock.monotonic()

    def extend(self, seconds: float) -> None:
        """Extend all leases by a time in which the gateway received no reports."""
        for service in self:
            service.lease_ends += seconds

    def expired(self) -> list[LiveService]:
        """List the services whose lease has ended."""
        now = self._clock.monotonic()
        return [service for service in self if service.lease_ends <= now]

    def stage_removal(self, change: Transaction, service_id: str) -> LiveService:
        """Forget a service.

        Raises:
            NotFound: there is no such service.
        """
        service = self.get(service_id)

        def follow() -> None:
            del self._services[service_id]
            self._unplace(service)
            self._unindex(service)
            service.changed.fire()

        change.write(DeleteRecord(ServiceRecord, service_id))
        change.then(follow)
        return service

    async def assign(self, service: LiveService, experiment_id: str | None) -> None:
        """Assign it to an experiment, or to none."""
        async with self._store.transaction() as change:
            self.stage_assignment(change, service, experiment_id)

    def stage_assignment(self, change: Transaction, service: LiveService, experiment_id: str | None) -> None:
        """Assign it to an experiment, or to none."""
        record = replace(change.staged(service, service.record), experiment_id=experiment_id)

        def follow() -> None:
            self._unindex(service)
            service.leaving = None
            service.released_from = service.experiment_id
            service.record = record
            self._index(service)
            service.changed.fire()

        change.stage(service, record)
        change.write(PutRecord(record))
        change.then(follow)

    def _remember(self, service: LiveService) -> None:
        self._services[service.id] = service
        self.by_incarnation[service.record.incarnation] = service
        self._places.setdefault(_place_of(service.record), {})[service.id] = service

    def _unplace(self, service: LiveService) -> None:
        """Forget where a service is, before its record is replaced; of a new one nothing is known."""
        if self.by_incarnation.get(service.record.incarnation) is service:
            del self.by_incarnation[service.record.incarnation]
        place = _place_of(service.record)
        there = self._places.get(place, {})
        there.pop(service.id, None)
        if not there:
            self._places.pop(place, None)

    def _index(self, service: LiveService) -> None:
        for index in self._indices_of(service):
            if service.experiment_id is not None:
                index.setdefault(service.experiment_id, {})[service.id] = service

    def _unindex(self, service: LiveService) -> None:
        for index in self._indices_of(service):
            if service.experiment_id in index:
                index[service.experiment_id].pop(service.id, None)
                if not index[service.experiment_id]:
                    del index[service.experiment_id]

    def _indices_of(self, service: LiveService) -> list[dict[str, dict[str, LiveService]]]:
        return [self._assigned, self._trainers] if service.kind is ServiceKind.TRAINER else [self._assigned]

    def stage_drain(self, change: Transaction, service: LiveService, notice_seconds: float) -> None:
        """Let it finish the work it has in progress and take nothing new, ever."""
        notice = self.notice(DRAINED, notice_seconds)
        record = replace(change.staged(service, service.record), is_draining=True, notice_ends_at=notice.until)

        def follow() -> None:
            service.drained = notice
            service.record = record
            service.changed.fire()

        change.write(PutRecord(record))
        change.then(follow)

    def notice(self, reason: str, seconds: float) -> Notice:
        """Make a notice that begins now."""
        return Notice(reason, self._clock.monotonic() + seconds, self._clock.now() + seconds)

    def is_overdue(self, service: LiveService) -> bool:
        """Whether it was drained and still works although its notice is long over."""
        return service.drained is not None and self._clock.monotonic() > service.drained.ends_at + OVERDUE_SECONDS

    def facts(self, service: LiveService) -> ServiceFacts:
        """What matters for a service's desired state."""
        return service.facts(self._clock.monotonic())

    def view(self, service: LiveService) -> ServiceView:
        """Show a service."""
        record = service.record
        return ServiceView(
            service_id=record.id,
            kind=service.kind,
            address=record.address,
            host=record.host,
            pid=record.pid,
            capabilities=service.capabilities,
            registered_at=rfc3339(record.registered_at),
            lease_expires_in_seconds=round(max(0.0, service.lease_ends - self._clock.monotonic()), 3),
            is_draining=service.is_draining,
            experiment_id=record.experiment_id,
            leaving=service.leaving.reason if service.leaving else None,
            notice_ends_in_seconds=None if (left := self.facts(service).notice_seconds) is None else round(left, 3),
            observed=service.observed,
        )


def _place_of(record: ServiceRecord) -> Place:
    return record.kind, record.host, record.address


def _is_unspecified(address: str) -> bool:
    """Whether an address means every interface, so that two machines of one name could both have it."""
    try:
        return ip_address(urlsplit(address).hostname or "").is_unspecified
    except ValueError:
        return False


def wake_services(registry: Registry, experiment_id: str) -> None:
    """Let all services of an experiment ask again what they should do."""
    fire_in_turn([service.changed for service in registry.of(experiment_id)])


TOLD_SECONDS = (1, 2, 5, 10, 15, 20, 30, 45, 60, 120, 300)
"""Steps to which a silence is rounded: each new value changes a stored record."""


def no_contact(record: ServiceRecord, seconds: float) -> str:
    """Report that a service's host is silent, such as ``no contact with 10.0.0.3 (rollout-1a2b3c4d) for 10 s``."""
    return f"no contact with {host_of(record)} for {told(seconds)} s"


def told(seconds: float) -> int:
    """Round a silence down to one of these steps."""
    return max((each for each in TOLD_SECONDS if each <= seconds), default=0)


def host_of(record: ServiceRecord) -> str:
    """Name a service's host, and the service: ``10.0.0.3 (rollout-1a2b3c4d)``."""
    return f"{urlsplit(record.address).hostname or record.host} ({record.id})"
