"""The open publications: applies events, keeps deadlines, commits, stores.

``negotiation.transition`` decides; this module gives it events one at a time per experiment, stores what it decided,
and wakes those who wait.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.gateway.events.log import EventLog
from services.gateway.publications.durations import Durations
from services.gateway.publications.epochs import Epoch, epoch_for
from services.gateway.publications.negotiation import DeadlinePassed as Late
from services.gateway.publications.negotiation import (
    MemberGone,
    Negotiation,
    NegotiationEvent,
    SenderGone,
    announce,
    transition,
)
from services.gateway.publications.transports import transport_for
from services.gateway.records.repository import Experiment, ExperimentRepository
from services.gateway.registry.services import LiveService, Registry
from services.gateway.signals import Signal, wait_for_any
from services.gateway.store.base import Store
from services.gateway.store.records import PublicationRecord
from shared.clock import Clock
from shared.errors import Conflict, NotFound, StalePolicyVersion, Unavailable
from shared.schemas.publication import (
    Manifest,
    Member,
    Publication,
    PublicationOrder,
    PublicationPhase,
    PublicationRequest,
    Rendezvous,
    Transport,
)
from shared.schemas.service import ServiceKind, WorkState

log = logging.getLogger(__name__)

SLOWEST_BYTES_PER_SECOND = 50_000_000
SENDER_PHASES = 3
"""The sender may take this many phase deadlines to open an epoch: nobody else waits busily for it."""

AT_WORK = frozenset({WorkState.STARTING, WorkState.RUNNING, WorkState.PAUSED})


@dataclass
class _Open:
    """A publication that is not over."""

    negotiation: Negotiation
    announced_at: float
    deadline: float
    changed: Signal = field(default_factory=Signal)


class Publications:
    """Publications of all experiments.

    Args:
        phase_seconds: what each phase may take besides the time of the bytes.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        registry: Registry,
        repository: ExperimentRepository,
        events: EventLog,
        *,
        phase_seconds: float,
    ) -> None:
        self._store = store
        self._clock = clock
        self._registry = registry
        self._repository = repository
        self._events = events
        self._phase_seconds = phase_seconds
        self.durations = Durations(store, clock)
        self._open: dict[str, _Open] = {}
        self._epochs: dict[str, Epoch] = {}
        self._last_numbers: dict[str, int] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._checksums: dict[str, dict[int, str]] = {}

    async def load(self) -> None:
        """Load what an earlier process had open; its deadlines start again."""
        for experiment in self._repository:
            records = await self._store.publications(experiment.id)
            await self._load_committed(experiment, records)
            if not records or experiment.state.is_final:
                continue
            self._last_numbers[experiment.id] = max(record.epoch for record in records)
            newest = max(records, key=lambda record: record.announced_at)
            negotiation = _negotiation(newest)
            if not negotiation.is_over:
                self._open[experiment.id] = _Open(negotiation, newest.announced_at, self._deadline(negotiation))
            elif negotiation.phase is PublicationPhase.COMMITTED and negotiation.epoch.is_ready:
                self._epochs[experiment.id] = negotiation.epoch

    async def _load_committed(self, experiment: Experiment, records: Sequence[PublicationRecord]) -> None:
        """Let the experiment know of a commit that a process wrote, and its services heard of, just before it died."""
        committed = [record for record in records if record.phase == PublicationPhase.COMMITTED.value]
        newest = max(committed, key=lambda record: record.version, default=None)
        self._checksums[experiment.id] = {each.version: _negotiation(each).manifest.checksum for each in committed}
        if newest is not None and newest.version > experiment.record.policy_version:
            await self._repository.update(experiment, policy_version=newest.version, published_step=newest.step)

    def phase_seconds(self, manifest: Manifest) -> float:
        """How long each phase of a publication may take."""
        return self._phase_seconds + manifest.image_bytes / SLOWEST_BYTES_PER_SECOND

    def checksum_of(self, experiment_id: str, version: int) -> str | None:
        """Name the image that was committed as a version; None for the initial weights."""
        return self._checksums.get(experiment_id, {}).get(version)

    def open_phase(self, experiment_id: str) -> PublicationPhase | None:
        """Phase of the open publication of an experiment; None if there is none."""
        entry = self._open.get(experiment_id)
        return entry.negotiation.phase if entry else None

    async def announce(self, experiment_id: str, request: PublicationRequest) -> Publication:
        """Open a publication.

        Raises:
            StalePolicyVersion: the version is not newer than the current one.
            Conflict: the experiment is not active, or the caller is not its trainer.
            Unavailable: the gateway has just started and has not yet heard from every rollout.
        """
        experiment = self._repository.get(experiment_id)
        async with self._lock(experiment_id):
            self._check(experiment, request)
            version = request.manifest.version
            entry = self._open.get(experiment_id)
            if entry is not None:
                known = entry.negotiation
                is_repeated = (
                    _whole(known.manifest) == _whole(request.manifest) and known.epoch.sender == request.service_id
                )
                if is_repeated and known.epoch.rendezvous is None:
                    return self._view(experiment_id, known)
                await self._move_to(experiment, entry, transition(known, SenderGone("announced again")))
            transports = self._transports(experiment, request.manifest)
            last_number = self._last_numbers.get(experiment_id, 0)
            epoch = epoch_for(self._epochs.get(experiment_id), last_number, request.service_id, transports)
            manifest = self._applicable(request.manifest, epoch)
            negotiation = announce(version, request.step, manifest, epoch)
            entry = _Open(negotiation, self._clock.now(), self._deadline(negotiation))
            self._open[experiment_id] = entry
            self.durations.announced(experiment_id)
            await self._events.append(
                experiment_id,
                "publication_announced",
                version=version,
                epoch=epoch.number,
                members=sorted(transports),
                transports=sorted({transport.value for transport in transports.values()}),
            )
            await self._move_to(experiment, entry, negotiation)
            return self._view(experiment_id, entry.negotiation)

    def _transports(self, experiment: Experiment, manifest: Manifest) -> dict[str, Transport]:
        """Name the rollouts that the version can be sent to, and how each gets it."""
        trainer = self._registry.trainer_of(experiment.id)
        assert trainer is not None
        found = {}
        for service in self._registry.of(experiment.id):
            if can_receive(service):
                transport = transport_for(experiment.spec, trainer.capabilities, service.capabilities)
                if transport is not None and (manifest.image_path or transport is not Transport.SHARED_MEMORY):
                    found[service.id] = transport
        return found

    def _applicable(self, manifest: Manifest, epoch: Epoch) -> Manifest:
        """Drop the patch from a manifest unless every member that would receive it holds its base."""
        holders = (self._registry.find(service_id) for service_id in epoch.collective)
        held = {service.observed.held_image if service else None for service in holders}
        return manifest if manifest.delta and held == {manifest.delta.base_checksum} else _whole(manifest)

    def _check(self, experiment: Experiment, request: PublicationRequest) -> None:
        if not experiment.is_active:
            raise Conflict(f"experiment {experiment.id} is {experiment.state}: nothing is published")
        trainer = self._registry.trainer_of(experiment.id)
        if trainer is None or trainer.id != request.service_id:
            raise Conflict(f"{request.service_id} is not the trainer of {experiment.id}")
        version, current = request.manifest.version, experiment.record.policy_version
        if version <= current:
            raise StalePolicyVersion(f"version {version} is not newer than {current}", version=version, current=current)
        unheard = [s.id for s in self._registry.of(experiment.id, ServiceKind.ROLLOUT) if not s.is_observed]
        if unheard:
            raise Unavailable(f"the gateway has not yet heard from {', '.join(unheard)}")

    async def apply(self, experiment_id: str, event: NegotiationEvent) -> None:
        """Apply an event; without an open publication it means nothing."""
        if experiment_id not in self._open:
            self._forget_epoch(experiment_id, event)
            return
        async with self._lock(experiment_id):
            entry = self._open.get(experiment_id)
            if entry is None:
                return
            after = transition(entry.negotiation, event)
            if after != entry.negotiation:
                await self._move_to(self._repository.get(experiment_id), entry, after)

    async def apply_to_version(self, experiment_id: str, version: int, event: NegotiationEvent) -> Publication:
        """Apply an event of one version, and show the publication after it."""
        entry = self._open.get(experiment_id)
        if entry is not None and entry.negotiation.version == version:
            await self.apply(experiment_id, event)
        return await self.get(experiment_id, version)

    async def get(
        self,
        experiment_id: str,
        version: int,
        *,
        wait_seconds: float = 0.0,
        phase: PublicationPhase | None = None,
        epoch: int | None = None,
    ) -> Publication:
        """Show a publication; waits while it is at ``phase`` and ``epoch``.

        Raises:
            NotFound: the version was never announced.
        """
        end = self._clock.monotonic() + wait_seconds
        while True:
            entry = self._open.get(experiment_id)
            if entry is None or entry.negotiation.version != version:
                record = await self._store.publication(experiment_id, version)
                if record is None:
                    raise NotFound(f"version {version} of {experiment_id} was never announced", version=version)
                return self._view(experiment_id, _negotiation(record))
            changed = entry.changed.next
            view = self._view(experiment_id, entry.negotiation)
            remaining = end - self._clock.monotonic()
            is_changed = (phase is not None and view.phase != phase) or (epoch is not None and view.epoch != epoch)
            if is_changed or remaining <= 0 or (phase is None and epoch is None):
                return view
            await wait_for_any(remaining, changed)

    async def all(self, experiment_id: str) -> list[Publication]:
        """List an experiment's publications by version."""
        records = await self._store.publications(experiment_id)
        return [self._view(experiment_id, _negotiation(record)) for record in records]

    def order_for(self, service_id: str, experiment_id: str) -> PublicationOrder | None:
        """What a service has to do for the open publication of its experiment; None unless it is a member."""
        entry = self._open.get(experiment_id)
        if entry is None:
            return None
        negotiation = entry.negotiation
        member = next((each for each in negotiation.epoch.members if each.service_id == service_id), None)
        if member is None:
            return None
        return PublicationOrder(
            version=negotiation.version,
            epoch=negotiation.epoch.number,
            transport=member.transport,
            rank=member.rank,
            phase=negotiation.phase,
            rendezvous=negotiation.epoch.rendezvous,
            manifest=negotiation.manifest,
            deadline_seconds=self.phase_seconds(negotiation.manifest),
        )

    def extend(self, seconds: float) -> None:
        """Let the open phases last longer: in that time nobody could be heard."""
        for entry in self._open.values():
            entry.deadline += seconds

    async def check_deadlines(self) -> None:
        """Apply ``DeadlinePassed`` to every phase that took too long."""
        now = self._clock.monotonic()
        for experiment_id in [key for key, entry in self._open.items() if entry.deadline <= now]:
            await self.apply(experiment_id, Late())

    async def gone(self, experiment_id: str, service: LiveService, reason: str) -> None:
        """Record that a service does not work for the experiment any more."""
        if service.kind is ServiceKind.TRAINER:
            await self.apply(experiment_id, SenderGone(f"trainer {service.id}: {reason}"))
        elif service.kind is ServiceKind.ROLLOUT:
            await self.apply(experiment_id, MemberGone(service.id))
            await self.durations.gone(experiment_id, service.id)

    async def close(self, experiment_id: str, reason: str) -> None:
        """Abort what is open and forget the epoch: the experiment ends."""
        await self.apply(experiment_id, SenderGone(reason))
        self._epochs.pop(experiment_id, None)
        self._checksums.pop(experiment_id, None)
        await self.durations.close(experiment_id)

    def _forget_epoch(self, experiment_id: str, event: NegotiationEvent) -> None:
        epoch = self._epochs.get(experiment_id)
        is_broken = isinstance(event, SenderGone) or (
            isinstance(event, MemberGone) and epoch is not None and event.service_id in epoch.service_ids
        )
        if is_broken:
            self._epochs.pop(experiment_id, None)

    async def _move_to(self, experiment: Experiment, entry: _Open, after: Negotiation) -> None:
        before, entry.negotiation = entry.negotiation, after
        self.durations.moved(experiment.id, before, after)
        if (after.phase, after.epoch) != (before.phase, before.epoch):
            entry.deadline = self._deadline(after)
        self._last_numbers[experiment.id] = max(self._last_numbers.get(experiment.id, 0), after.epoch.number)
        if after.is_over:
            del self._open[experiment.id]
            is_healthy = after.phase is PublicationPhase.COMMITTED and after.epoch.is_ready
            if is_healthy:
                self._epochs[experiment.id] = after.epoch
            else:
                self._epochs.pop(experiment.id, None)
        elif after.epoch.number != before.epoch.number:
            self._epochs.pop(experiment.id, None)
        await self._remember(experiment, entry, before)
        entry.changed.fire()
        for service_id in before.members | after.members:
            service = self._registry.find(service_id)
            if service is not None:
                service.changed.fire()

    async def _remember(self, experiment: Experiment, entry: _Open, before: Negotiation) -> None:
        after = entry.negotiation
        await self._store.put_publication(_record(experiment.id, after, entry.announced_at, self._clock.now()))
        facts = {"version": after.version, "epoch": after.epoch.number, "reason": after.reason}
        if after.phase is PublicationPhase.COMMITTED:
            self._checksums.setdefault(experiment.id, {})[after.version] = after.manifest.checksum
            await self._repository.update(experiment, policy_version=after.version, published_step=after.step)
            seconds = round(self._clock.now() - entry.announced_at, 3)
            delta = after.manifest.delta
            await self._events.append(
                experiment.id,
                "publication_committed",
                **facts,
                members=list(after.epoch.service_ids),
                image_bytes=after.manifest.image_bytes,
                patch_bytes=delta.patch_bytes if delta else None,
                seconds=seconds,
                step=after.step,
            )
        elif after.phase is PublicationPhase.ABORTED:
            await self._events.append(experiment.id, "publication_aborted", **facts)
        elif after.epoch.number != before.epoch.number:
            await self._events.append(experiment.id, "publication_epoch_closed", **facts)

    def _deadline(self, negotiation: Negotiation) -> float:
        waits_for_sender = not negotiation.epoch.is_ready
        phases = SENDER_PHASES if waits_for_sender else 1
        return self._clock.monotonic() + phases * self.phase_seconds(negotiation.manifest)

    def _lock(self, experiment_id: str) -> asyncio.Lock:
        return self._locks.setdefault(experiment_id, asyncio.Lock())

    def _view(self, experiment_id: str, negotiation: Negotiation) -> Publication:
        return Publication(
            experiment_id=experiment_id,
            version=negotiation.version,
            epoch=negotiation.epoch.number,
            phase=negotiation.phase,
            members=negotiation.epoch.members,
            rendezvous=negotiation.epoch.rendezvous,
            deadline_seconds=self.phase_seconds(negotiation.manifest),
            reason=negotiation.reason,
            is_delta=negotiation.manifest.delta is not None,
        )


def _whole(manifest: Manifest) -> Manifest:
    return manifest.model_copy(update={"delta": None})


def can_receive(service: LiveService) -> bool:
    """Whether a service is a rollout whose engine runs."""
    observed = service.observed
    has_engine = observed.policy_version is not None and observed.policy_version >= 0
    is_at_work = observed.experiment_id == service.experiment_id and observed.state in AT_WORK
    return service.kind is ServiceKind.ROLLOUT and has_engine and is_at_work and not service.is_draining


def _record(experiment_id: str, negotiation: Negotiation, announced_at: float, now: float) -> PublicationRecord:
    rendezvous = negotiation.epoch.rendezvous
    return PublicationRecord(
        experiment_id=experiment_id,
        version=negotiation.version,
        step=negotiation.step,
        epoch=negotiation.epoch.number,
        phase=negotiation.phase.value,
        service_id=negotiation.epoch.sender,
        manifest=negotiation.manifest.model_dump(mode="json"),
        members=[member.model_dump(mode="json") for member in negotiation.epoch.members],
        rendezvous=rendezvous.model_dump() if rendezvous else None,
        reason=negotiation.reason,
        announced_at=announced_at,
        ended_at=now if negotiation.is_over else None,
    )


def _negotiation(record: PublicationRecord) -> Negotiation:
    """Rebuild the state that a record describes; members report again how far they are."""
    members = tuple(Member.model_validate(member) for member in record.members)
    rendezvous = Rendezvous.model_validate(record.rendezvous) if record.rendezvous else None
    return Negotiation(
        version=record.version,
        step=record.step,
        manifest=Manifest.model_validate(record.manifest),
        epoch=Epoch(record.epoch, record.service_id, members, rendezvous),
        phase=PublicationPhase(record.phase),
        reason=record.reason,
    )
