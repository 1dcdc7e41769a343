"""The open publications: applies events, keeps deadlines, commits, stores.

``negotiation.transition`` decides; this module gives it events one at a time, stores what it decided together with all
that follows from it, and wakes those who wait.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flotilla.services.gateway.events.log import EventLog
from flotilla.services.gateway.publications.durations import Durations
from flotilla.services.gateway.publications.negotiation import DeadlinePassed as Late
from flotilla.services.gateway.publications.negotiation import (
    Epoch,
    MemberGone,
    Negotiation,
    NegotiationEvent,
    Reported,
    SenderGone,
    announce,
    breaks_epoch,
    epoch_for,
    is_alike,
    negotiation_of,
    newest_of,
    order_of,
    transition,
    view_of,
)
from flotilla.services.gateway.publications.transports import MOST_IN_GROUP, receivers_of
from flotilla.services.gateway.records.repository import Experiment, ExperimentRepository
from flotilla.services.gateway.registry.services import LiveService, Registry
from flotilla.services.gateway.signals import Signal, fire_in_turn, wait_for_any
from flotilla.services.gateway.store.answers import stage_answer
from flotilla.services.gateway.store.base import Store
from flotilla.services.gateway.store.records import PublicationRecord
from flotilla.services.gateway.store.transaction import Transaction
from flotilla.services.gateway.store.writes import PutRecord
from flotilla.shared.clock import Clock
from flotilla.shared.errors import Conflict, NotFound, StalePolicyVersion, Unavailable
from flotilla.shared.schemas.publication import (
    Manifest,
    Publication,
    PublicationOrder,
    PublicationPhase,
    PublicationRequest,
)
from flotilla.shared.schemas.service import ServiceKind

SLOWEST_BYTES_PER_SECOND = 50_000_000
SENDER_PHASES = 3
"""The sender may take this many phase deadlines to open an epoch: no other member blocks on it."""


@dataclass(eq=False)
class _Open:
    """A publication that is not over.

    Attributes:
        announced_at: seconds since the epoch, to be shown.
        described: a manifest and its document, made once for all changes of the publication.
        began, deadline: seconds of the monotonic clock.
    """

    negotiation: Negotiation
    announced_at: float
    began: float
    deadline: float
    changed: Signal = field(default_factory=Signal)
    described: tuple[Manifest, dict[str, Any]] | None = None

    def document_of(self, manifest: Manifest) -> dict[str, Any]:
        """Write a manifest as a document."""
        if self.described is None or self.described[0] is not manifest:
            self.described = manifest, manifest.model_dump(mode="json")
        return self.described[1]


class Publications:
    """Publications of all experiments.

    Args:
        phase_seconds: what each phase may take besides the time of the bytes.

    Attributes:
        most_in_group: members of a gloo group; others are relayed to.
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
        self.most_in_group = MOST_IN_GROUP
        self.durations = Durations(store, clock, events)
        self._open: dict[str, _Open] = {}
        self._epochs: dict[str, Epoch] = {}
        self._last_numbers: dict[str, int] = {}
        self._committed: dict[str, dict[int, Manifest]] = {}
        self._over: dict[str, Negotiation] = {}
        """What ended last, which its sender waits for: to read it back costs as much as the rest of the wait."""

    async def load(self) -> None:
        """Load what an earlier process had open; its deadlines start again."""
        for experiment in self._repository:
            records = await self._store.publications(experiment.id, live_at=experiment.record.policy_version)
            await self.durations.load(experiment.id)
            if records:
                async with self._store.transaction() as change:
                    self._load_records(change, experiment, records)

    def _load_records(self, change: Transaction, experiment: Experiment, records: Sequence[PublicationRecord]) -> None:
        self._last_numbers[experiment.id] = max(record.epoch for record in records)
        committed = self._committed.setdefault(experiment.id, {})
        newest = newest_of(records)
        for record in records:
            negotiation = negotiation_of(record)
            if negotiation.phase is PublicationPhase.COMMITTED:
                committed[record.version] = negotiation.manifest
            if not negotiation.is_over:
                began = self._clock.monotonic() - max(0.0, self._clock.now() - record.announced_at)
                entry = _Open(negotiation, record.announced_at, began, self._deadline(negotiation))
                if record is newest and experiment.is_active:
                    self._open[experiment.id] = entry
                else:
                    self._move_to(
                        change, experiment, entry, transition(negotiation, SenderGone("the experiment ended"))
                    )
            elif record is newest and negotiation.phase is PublicationPhase.COMMITTED and negotiation.epoch.is_ready:
                self._epochs[experiment.id] = negotiation.epoch

    def phase_seconds(self, manifest: Manifest) -> float:
        """How long each phase of a publication may take."""
        return self._phase_seconds + manifest.image_bytes / SLOWEST_BYTES_PER_SECOND

    def committed(self, experiment_id: str, version: int) -> Manifest | None:
        """Return the manifest of the image that was committed as a version; None for the initial weights."""
        return self._committed.get(experiment_id, {}).get(version)

    def open_phase(self, experiment_id: str) -> PublicationPhase | None:
        """Phase of the open publication of an experiment; None if there is none."""
        entry = self._open.get(experiment_id)
        return entry.negotiation.phase if entry else None

    def is_member(self, experiment_id: str, service_id: str) -> bool:
        """Whether a service belongs to the open publication, or to the epoch that the next one may use again."""
        entry, epoch = self._open.get(experiment_id), self._epochs.get(experiment_id)
        if entry is not None:
            return service_id in entry.negotiation.members
        return epoch is not None and service_id in epoch.service_ids

    async def announce(self, experiment_id: str, service_id: str | None, request: PublicationRequest) -> Publication:
        """Open a publication that a trainer service will send.

        Raises:
            StalePolicyVersion: the version is not newer than the current one.
            Conflict: the experiment is not active, or the service is not its trainer.
            Unavailable: the gateway has just started and has not yet heard from every rollout.
        """
        experiment = self._repository.get(experiment_id)
        async with self._store.transaction() as change:
            trainer = self._check(experiment, service_id, request)
            publication = self._stage_announcement(change, experiment, trainer, request)
            stage_answer(change, publication)
        return publication

    def _stage_announcement(
        self, change: Transaction, experiment: Experiment, trainer: LiveService, request: PublicationRequest
    ) -> Publication:
        before, reusable = self._open.get(experiment.id), self._epochs.get(experiment.id)
        if before is not None:
            known, reusable = before.negotiation, None
            is_same = _whole(known.manifest) == _whole(request.manifest)
            if is_same and known.epoch.sender == trainer.id and known.epoch.rendezvous is None:
                return self._view(experiment.id, known)
            self._move_to(change, experiment, before, transition(known, SenderGone("announced again")))
        receivers = receivers_of(
            experiment.spec,
            trainer.capabilities,
            self._registry.of(experiment.id),
            () if reusable is None else reusable.collective,
            has_image=request.manifest.image_path is not None,
            most_in_group=self.most_in_group,
        )
        transports, ranks = receivers.transports, experiment.spec.engine_ranks
        last_number = self._last_numbers.get(experiment.id, 0)
        epoch = epoch_for(reusable, last_number, trainer.id, transports, ranks, receivers.beside)
        manifest = self._applicable(request.manifest, epoch)
        negotiation = announce(manifest.version, request.step, manifest, epoch)
        entry = _Open(negotiation, self._clock.now(), self._clock.monotonic(), self._deadline(negotiation))

        def follow() -> None:
            self._open[experiment.id] = entry

        change.then(follow)
        self.durations.stage_announced(change, experiment.id)
        self._events.stage(
            change,
            experiment.id,
            "publication_announced",
            version=manifest.version,
            epoch=epoch.number,
            members=sorted(transports),
            transports=receivers.ways,
        )
        self._move_to(change, experiment, entry, negotiation, is_new=True)
        return self._view(experiment.id, negotiation)

    def _applicable(self, manifest: Manifest, epoch: Epoch) -> Manifest:
        """Drop the patch from a manifest unless every member that would receive it holds its base."""
        holders = (self._registry.find(service_id) for service_id in epoch.collective)
        held = {service.observed.held_image if service else None for service in holders}
        return manifest if manifest.delta and held == {manifest.delta.base_checksum} else _whole(manifest)

    def _check(self, experiment: Experiment, service_id: str | None, request: PublicationRequest) -> LiveService:
        if not experiment.is_active:
            raise Conflict(f"experiment {experiment.id} is {experiment.state}: nothing is published")
        trainer = self._registry.trainer_of(experiment.id)
        if trainer is None or trainer.id != service_id:
            raise Conflict(f"{service_id or 'no service'} is not the trainer of {experiment.id}")
        version, current = request.manifest.version, experiment.record.policy_version
        if version <= current:
            raise StalePolicyVersion(f"version {version} is not newer than {current}", version=version, current=current)
        unheard = [s.id for s in self._registry.of(experiment.id, ServiceKind.ROLLOUT) if not s.is_observed]
        if unheard:
            raise Unavailable(f"the gateway has not yet heard from {', '.join(unheard)}")
        return trainer

    async def apply(self, experiment_id: str, event: NegotiationEvent) -> None:
        """Apply an event; without an open publication it means nothing."""
        if experiment_id in self._open or breaks_epoch(event, self._epochs.get(experiment_id)):
            async with self._store.transaction() as change:
                self.stage(change, experiment_id, event)

    def stage(self, change: Transaction, experiment_id: str, event: NegotiationEvent) -> None:
        """Apply an event; without an open publication it means nothing."""
        entry = self._open.get(experiment_id)
        if entry is not None:
            negotiation = change.staged(entry, entry.negotiation)
            after = transition(negotiation, event)
            if after != negotiation:
                self._move_to(change, self._repository.get(experiment_id), entry, after)
            if not isinstance(event, Reported):
                stage_answer(change, self._view(experiment_id, after))
        elif breaks_epoch(event, self._epochs.get(experiment_id)):
            change.then(lambda: self._epochs.pop(experiment_id, None))

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
                over = self._over.get(experiment_id)
                if over is not None and over.version == version:
                    return self._view(experiment_id, over)
                record = await self._store.publication(experiment_id, version)
                if record is None:
                    raise NotFound(f"version {version} of {experiment_id} was never announced", version=version)
                return self._view(experiment_id, negotiation_of(record))
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
        return [self._view(experiment_id, negotiation_of(record)) for record in records]

    def order_for(self, service_id: str, experiment_id: str) -> PublicationOrder | None:
        """What a service has to do for the open publication of its experiment; None unless it is a member."""
        entry = self._open.get(experiment_id)
        if entry is None:
            return None
        deadline = self.phase_seconds(entry.negotiation.manifest)
        return order_of(service_id, entry.negotiation, deadline, self._address_of)

    def _address_of(self, service_id: str) -> str | None:
        service = self._registry.find(service_id)
        return None if service is None else service.record.address

    def extend(self, seconds: float) -> None:
        """Extend the open phases by a time in which the gateway received no reports."""
        for entry in self._open.values():
            entry.deadline += seconds

    async def check_deadlines(self) -> None:
        """Apply ``DeadlinePassed`` to every phase that took too long."""
        now = self._clock.monotonic()
        for experiment_id in [key for key, entry in self._open.items() if entry.deadline <= now]:
            async with self._store.transaction() as change:
                # Asked again: the phase may have ended, and another begun, while this waited for its turn.
                entry = self._open.get(experiment_id)
                if entry is not None and entry.deadline <= now:
                    self.stage(change, experiment_id, Late())

    def stage_gone(self, change: Transaction, experiment_id: str, service: LiveService, reason: str) -> None:
        """Record that a service does not work for the experiment any more."""
        if service.kind is ServiceKind.TRAINER:
            self.stage(change, experiment_id, SenderGone(f"trainer {service.id}: {reason}"))
        elif service.kind is ServiceKind.ROLLOUT:
            self.stage(change, experiment_id, MemberGone(service.id))
            self.durations.stage_gone(change, experiment_id, service.id)

    def stage_close(self, change: Transaction, experiment_id: str, reason: str) -> None:
        """Abort what is open and forget the epoch: the experiment ends."""
        self.stage(change, experiment_id, SenderGone(reason))
        # The checksum stays: one that failed continues with its version when it is resumed.
        change.then(lambda: self._epochs.pop(experiment_id, None))
        self.durations.stage_close(change, experiment_id)

    def _move_to(
        self, change: Transaction, experiment: Experiment, entry: _Open, after: Negotiation, *, is_new: bool = False
    ) -> None:
        """Stage what a publication has come to; memory follows once it is stored.

        The progress of a member is not stored: members report it with every call. So a report costs the same
        however many members there are.
        """
        before = change.staged(entry, entry.negotiation)
        change.stage(entry, after)
        if not is_new and is_alike(before, after):
            self.durations.stage_progress(change, experiment.id, before, after)
            change.then(lambda: self._follow_progress(entry, after))
            return
        change.write(PutRecord(_record_of(experiment.id, entry, after, self._clock.now())))
        facts = {"version": after.version, "epoch": after.epoch.number, "reason": after.reason}
        if after.phase is PublicationPhase.COMMITTED:
            self._stage_commit(change, experiment, entry, after)
        elif after.phase is PublicationPhase.ABORTED:
            self._events.stage(change, experiment.id, "publication_aborted", **facts)
        elif after.epoch.number != before.epoch.number:
            self._events.stage(change, experiment.id, "publication_epoch_closed", **facts)
        self.durations.stage_moved(change, experiment.id, before, after)
        change.then(lambda: self._follow(experiment, entry, after))

    def _stage_commit(self, change: Transaction, experiment: Experiment, entry: _Open, after: Negotiation) -> None:
        self._repository.stage(change, experiment, policy_version=after.version, published_step=after.step)
        delta = after.manifest.delta
        self._events.stage(
            change,
            experiment.id,
            "publication_committed",
            version=after.version,
            epoch=after.epoch.number,
            reason=after.reason,
            members=list(after.epoch.service_ids),
            image_bytes=after.manifest.image_bytes,
            checksum=after.manifest.checksum,
            base=after.manifest.base,
            patch_bytes=delta.patch_bytes if delta else None,
            seconds=round(self._clock.monotonic() - entry.began, 3),
            step=after.step,
        )

    def _follow_progress(self, entry: _Open, after: Negotiation) -> None:
        """Notify the members that were given a source; the others have nothing new to do."""
        before, entry.negotiation = entry.negotiation, after
        if after.relays is not before.relays:
            given = after.relays.sources.keys() - before.relays.sources.keys()
            self._wake(given)

    def _wake(self, service_ids: Iterable[str]) -> None:
        found = (self._registry.find(service_id) for service_id in service_ids)
        fire_in_turn([service.changed for service in found if service is not None])

    def _follow(self, experiment: Experiment, entry: _Open, after: Negotiation) -> None:
        before, entry.negotiation = entry.negotiation, after
        if (after.phase, after.epoch) != (before.phase, before.epoch):
            entry.deadline = self._deadline(after)
        self._last_numbers[experiment.id] = max(self._last_numbers.get(experiment.id, 0), after.epoch.number)
        is_committed = after.phase is PublicationPhase.COMMITTED
        if is_committed:
            self._committed[experiment.id] = {after.version: after.manifest}
        if after.is_over:
            self._open.pop(experiment.id, None)
            self._over[experiment.id] = after
            if is_committed and after.epoch.is_ready:
                self._epochs[experiment.id] = after.epoch
            else:
                self._epochs.pop(experiment.id, None)
        elif after.epoch.number != before.epoch.number:
            self._epochs.pop(experiment.id, None)
        entry.changed.fire()
        self._wake(before.members | after.members)

    def _deadline(self, negotiation: Negotiation) -> float:
        waits_for_sender = not negotiation.epoch.is_ready
        phases = SENDER_PHASES if waits_for_sender else 1
        if negotiation.phase is PublicationPhase.TRANSFERRING:
            phases += negotiation.relays.waves
        return self._clock.monotonic() + phases * self.phase_seconds(negotiation.manifest)

    def _view(self, experiment_id: str, negotiation: Negotiation) -> Publication:
        return view_of(experiment_id, negotiation, self.phase_seconds(negotiation.manifest))


def _whole(manifest: Manifest) -> Manifest:
    return manifest.model_copy(update={"delta": None})


def _record_of(experiment_id: str, entry: _Open, negotiation: Negotiation, now: float) -> PublicationRecord:
    rendezvous = negotiation.epoch.rendezvous
    return PublicationRecord(
        experiment_id=experiment_id,
        version=negotiation.version,
        step=negotiation.step,
        epoch=negotiation.epoch.number,
        phase=negotiation.phase.value,
        service_id=negotiation.epoch.sender,
        manifest=entry.document_of(negotiation.manifest),
        members=[member.model_dump(mode="json") for member in negotiation.epoch.members],
        rendezvous=rendezvous.model_dump() if rendezvous else None,
        reason=negotiation.reason,
        announced_at=entry.announced_at,
        ended_at=now if negotiation.is_over else None,
    )
