"""One publication as a pure state machine: events in, the next state out. No clock, no store, no network.

    preparing      until every member has joined the epoch, or the deadline takes out those that have not; nobody has
                   to join where all members map the image
    transferring   until every member has reported the right checksum, or the deadline takes out those that have not
    committed      every remaining member holds the version (or none remained: they will pull it)
    aborted        the sender is gone, or announced another version

Taking a member out closes the epoch: the next one has a new number and no rendezvous, and starts in ``preparing``.
Reports of another epoch or version mean nothing, so late and repeated ones are harmless.

An epoch is one membership of the weight group, and may be used again while it stays open. Members of a collective have
ranks, dense from 1 in the order of service ids; rank 0 is the sending trainer. An engine that is a member itself has as
many as the devices that it divides its model among. Members that map the image or are relayed to have none, and an
epoch of such members alone needs no rendezvous. An epoch's number never returns within an experiment.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from flotilla.services.gateway.publications.relays import NO_RELAYS, NOBODY, Beside, Relays
from flotilla.services.gateway.registry.desired import url_at
from flotilla.services.gateway.store.records import PublicationRecord
from flotilla.shared.schemas.publication import (
    Manifest,
    Member,
    Publication,
    PublicationOrder,
    PublicationPhase,
    PublicationReport,
    ReceiveState,
    Rendezvous,
    Transport,
)


@dataclass(frozen=True, slots=True)
class Epoch:
    """One membership of the weight group.

    Attributes:
        number: grows with each change of membership; 0 before the first.
        sender: the trainer service that opened it.
        members: receivers with their ranks.
        rendezvous: where they meet; None until the sender has opened it.
        service_ids: members' services in the order of their ranks.
        by_id: members by service.
        collective: services that take part in the broadcast.
    """

    number: int
    sender: str
    members: tuple[Member, ...]
    rendezvous: Rendezvous | None = None
    # Made once: each member asks for its own part of a thousand.
    service_ids: tuple[str, ...] = field(init=False, compare=False, repr=False)
    by_id: Mapping[str, Member] = field(init=False, compare=False, repr=False)
    collective: frozenset[str] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        by_id = {member.service_id: member for member in self.members}
        object.__setattr__(self, "service_ids", tuple(by_id))
        object.__setattr__(self, "by_id", by_id)
        object.__setattr__(
            self, "collective", frozenset(name for name, member in by_id.items() if member.rank is not None)
        )

    @property
    def is_ready(self) -> bool:
        """Whether nothing has to be opened (any more) before its members can begin."""
        return self.rendezvous is not None or not self.collective


def members_of(
    transports: Mapping[str, Transport], engine_ranks: int = 1, beside: Beside = NOBODY
) -> tuple[Member, ...]:
    """Assign each service of a collective its ranks.

    Args:
        transports: the receiving members, and how each receives.
        engine_ranks: of each engine, where engines are members.
        beside: members without a relay.
    """
    members = []
    next_rank = 1
    for service_id, transport in sorted(transports.items()):
        rank = None if transport is Transport.SHARED_MEMORY or service_id in beside.relayed else next_rank
        num_ranks = engine_ranks if transport is Transport.ENGINE else 1
        next_rank += num_ranks if rank is not None else 0
        member = Member(service_id=service_id, rank=rank, num_ranks=num_ranks, transport=transport)
        memory = beside.memories.get(service_id)
        members.append(member if memory is None else member.model_copy(update={"shared_memory": memory}))
    return tuple(members)


def without(members: Iterable[Member], gone: Collection[str]) -> tuple[Member, ...]:
    """Leave some services out; the ranks of the others become dense again."""
    remain = [each for each in members if each.service_id not in gone]
    engine_ranks = max((each.num_ranks for each in remain), default=1)
    memories = {each.service_id: each.shared_memory for each in remain if each.shared_memory is not None}
    beside = Beside([each.service_id for each in remain if each.is_relayed_to], memories)
    return members_of({each.service_id: each.transport for each in remain}, engine_ranks, beside)


def epoch_for(
    previous: Epoch | None,
    last_number: int,
    sender: str,
    transports: Mapping[str, Transport],
    engine_ranks: int = 1,
    beside: Beside = NOBODY,
) -> Epoch:
    """Reuse the open epoch if sender and membership are the same, else number a new one.

    Members that receive by relay may come and go: no other member is connected to them.

    Args:
        previous: the epoch that is still open and healthy, if any.
        last_number: the highest number used so far.
        sender: the trainer service that will send.
        transports: the receiving members, and how each receives.
        engine_ranks: of each engine, where engines are members.
        beside: members outside the collective.
    """
    members = members_of(transports, engine_ranks, beside)
    if previous is not None and previous.is_ready and previous.sender == sender:
        if previous.members == members:
            return previous
        if previous.collective and _unrelayed(previous.members) == _unrelayed(members):
            return replace(previous, members=members)
    return Epoch(last_number + 1, sender, members)


def _unrelayed(members: Iterable[Member]) -> list[Member]:
    return [each for each in members if not each.is_relayed_to]


STALLS_BEFORE_BLAME = 1
"""Transfers that reached no member are tried once more with all: one dead member stalls the others too, and does
not confirm the next epoch."""

OPENINGS_BEFORE_PULL = 3
"""Epochs that the sender may fail to open before the members are left to the pull path."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The sender opened the epoch's store."""

    rendezvous: Rendezvous


@dataclass(frozen=True, slots=True)
class Reported:
    """A member said how far it is."""

    service_id: str
    report: PublicationReport


@dataclass(frozen=True, slots=True)
class Sent:
    """The sender finished its part."""

    epoch: int
    checksum: str


@dataclass(frozen=True, slots=True)
class SendFailed:
    """The sender could not finish its part."""

    epoch: int
    detail: str


@dataclass(frozen=True, slots=True)
class MemberGone:
    """A member's lease ended, or it was assigned elsewhere."""

    service_id: str


@dataclass(frozen=True, slots=True)
class SenderGone:
    """The sending trainer has left."""

    reason: str


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The phase took too long."""


NegotiationEvent = Opened | Reported | Sent | SendFailed | MemberGone | SenderGone | DeadlinePassed


@dataclass(frozen=True, slots=True)
class Negotiation:
    """The state of a publication.

    Attributes:
        step: optimiser steps that the version contains.
        joined, received: members of the present epoch that have reported it.
        is_sent: the sender reported that it is done in the present epoch.
        stalls: transfers of this publication that ended without any member having received it.
        failed_openings: epochs that the sender could not open.
        reason: why it was aborted, or why the last epoch was closed.
        relays: which member passes the version on to which, beside the collective.
    """

    version: int
    step: int
    manifest: Manifest
    epoch: Epoch
    phase: PublicationPhase
    joined: frozenset[str] = frozenset()
    received: frozenset[str] = frozenset()
    is_sent: bool = False
    stalls: int = 0
    failed_openings: int = 0
    reason: str | None = None
    relays: Relays = NO_RELAYS

    @property
    def is_over(self) -> bool:
        """Whether nothing changes any more."""
        return self.phase in {PublicationPhase.COMMITTED, PublicationPhase.ABORTED}

    @property
    def members(self) -> Set[str]:
        """Services that belong to the present epoch."""
        return self.epoch.by_id.keys()


def announce(version: int, step: int, manifest: Manifest, epoch: Epoch) -> Negotiation:
    """Start a publication; without members it is committed at once."""
    return Negotiation(
        version, step, manifest, epoch, _first_phase(epoch), relays=Relays.of(epoch.members, epoch.sender)
    )


def _first_phase(epoch: Epoch) -> PublicationPhase:
    if not epoch.members:
        return PublicationPhase.COMMITTED
    return PublicationPhase.PREPARING if epoch.collective else PublicationPhase.TRANSFERRING


def transition(state: Negotiation, event: NegotiationEvent) -> Negotiation:
    """Compute the state after one event; events that mean nothing here leave it as it is."""
    if state.is_over:
        return state
    match event:
        case Opened(rendezvous):
            return _opened(state, rendezvous)
        case Reported(service_id, report):
            return _reported(state, service_id, report)
        case Sent(epoch, checksum):
            return _sent(state, epoch, checksum)
        case SendFailed(epoch, detail):
            return _send_failed(state, epoch, detail)
        case MemberGone(service_id):
            return _without(state, {service_id}, f"{service_id} is gone") if service_id in state.members else state
        case SenderGone(reason):
            return replace(state, phase=PublicationPhase.ABORTED, reason=reason)
        case DeadlinePassed():
            return _late(state)


def _opened(state: Negotiation, rendezvous: Rendezvous) -> Negotiation:
    if rendezvous.epoch != state.epoch.number or state.epoch.rendezvous is not None:
        return state
    return replace(state, epoch=replace(state.epoch, rendezvous=rendezvous))


def _reported(state: Negotiation, service_id: str, report: PublicationReport) -> Negotiation:
    is_ours = report.version == state.version and report.epoch == state.epoch.number
    if not is_ours or service_id not in state.members:
        return state
    if report.state is ReceiveState.FAILED:
        return _without(state, {service_id}, f"{service_id} failed: {report.detail or 'no detail'}")
    if report.state is ReceiveState.RECEIVED and report.checksum != state.manifest.checksum:
        return _without(state, {service_id}, f"{service_id} received checksum {report.checksum}")
    state = replace(state, joined=state.joined | {service_id})
    if report.state is ReceiveState.RECEIVED and service_id not in state.received:
        received, relays = state.received | {service_id}, state.relays.received(service_id)
        state = replace(state, received=received, relays=relays)
    return _advance(state)


def _advance(state: Negotiation) -> Negotiation:
    if state.phase is PublicationPhase.PREPARING and state.epoch.collective <= state.joined:
        state = replace(state, phase=PublicationPhase.TRANSFERRING)
    if state.phase is PublicationPhase.TRANSFERRING and state.received == state.members:
        state = replace(state, phase=PublicationPhase.COMMITTED)
    return state


def _sent(state: Negotiation, epoch: int, checksum: str) -> Negotiation:
    if epoch != state.epoch.number:
        return state
    if checksum != state.manifest.checksum:
        return replace(state, phase=PublicationPhase.ABORTED, reason=f"the sender sent checksum {checksum}")
    return replace(state, is_sent=True)


def _send_failed(state: Negotiation, epoch: int, detail: str) -> Negotiation:
    if epoch != state.epoch.number:
        return state
    if state.phase is PublicationPhase.PREPARING:
        # Nothing was sent yet, so no member can be at fault; a sender that never gets it open leaves them to pull.
        is_permanent = state.failed_openings + 1 >= OPENINGS_BEFORE_PULL
        gone = set(state.epoch.collective) if is_permanent else set()
        return replace(_without(state, gone, f"the send failed: {detail}"), failed_openings=state.failed_openings + 1)
    if state.relays.is_used and not state.epoch.collective:
        return state  # There is nothing to send any more: the others are relayed to.
    # Those that hold the version are not at fault. If none does, a second failure leaves them all to the pull path.
    is_blamed = _has_reached(state) or state.stalls >= STALLS_BEFORE_BLAME
    silent = set(state.epoch.collective - state.received) if is_blamed else set()
    return _without(state, silent, f"the send failed: {detail}")


def _late(state: Negotiation) -> Negotiation:
    if not state.epoch.is_ready:
        return replace(state, phase=PublicationPhase.ABORTED, reason="the sender did not open the epoch in time")
    if state.phase is PublicationPhase.PREPARING:
        late = state.epoch.collective - state.joined
        return _without(state, set(late), f"did not join in time: {', '.join(sorted(late))}")
    late = frozenset(state.members - state.received)
    if late & state.epoch.collective:
        # Those that are relayed to may wait for it: they have their own time once it is out of the way.
        late -= {name for name, member in state.epoch.by_id.items() if member.is_relayed_to}
    if not _has_reached(state) and state.stalls < STALLS_BEFORE_BLAME:
        # A member that maps the image depends on no other: it alone is at fault.
        late -= state.epoch.collective
    if not late:
        return _without(state, set(), "nobody received the version in time")
    return _without(state, set(late), f"did not receive the version in time: {', '.join(sorted(late))}")


def _has_reached(state: Negotiation) -> bool:
    """Whether the broadcast has reached any member."""
    return bool(state.received & state.epoch.collective)


def _without(state: Negotiation, gone: set[str], reason: str) -> Negotiation:
    """Close the epoch and open the next with the members that remain; nothing is closed for members that map."""
    if gone and gone.isdisjoint(state.epoch.collective):
        remain = tuple(each for each in state.epoch.members if each.service_id not in gone)
        epoch = replace(state.epoch, members=remain)
        return _left(state, epoch, gone, reason)
    if state.relays.is_used and state.epoch.collective - gone <= state.received:
        # The group has done its part, so it is not formed again: its members pass the version on as before.
        epoch = _dissolved(state.epoch, gone)
        return _left(replace(state, phase=_first_phase(epoch)), epoch, gone, reason)
    # Whatever went wrong with a patch does not go wrong again.
    state = replace(state, manifest=state.manifest.model_copy(update={"delta": None}))
    epoch = Epoch(state.epoch.number + 1, state.epoch.sender, without(state.epoch.members, gone))
    is_stall = state.phase is PublicationPhase.TRANSFERRING and state.epoch.collective and not _has_reached(state)
    stalls = state.stalls + (1 if is_stall else 0)
    remaining = frozenset(epoch.service_ids)
    if remaining and remaining <= state.received:
        # All remaining members hold the version already.
        joined, received = state.joined & remaining, state.received & remaining
        committed = replace(state, epoch=epoch, joined=joined, received=received, reason=reason)
        return replace(committed, phase=PublicationPhase.COMMITTED)
    # What was mapped stays mapped, whatever becomes of the collective.
    mapped = (state.received & remaining) - epoch.collective
    relays = Relays.of(epoch.members, epoch.sender)
    for name in sorted(mapped):
        relays = relays.received(name)
    return replace(
        state,
        epoch=epoch,
        phase=_first_phase(epoch),
        joined=mapped,
        received=mapped,
        is_sent=False,
        stalls=stalls,
        reason=reason,
        relays=relays,
    )


def _left(state: Negotiation, epoch: Epoch, gone: set[str], reason: str) -> Negotiation:
    """Continue in an epoch without some members, where nothing has to be sent again for it."""
    joined, received = state.joined - gone, state.received - gone
    left = replace(state, epoch=epoch, joined=joined, received=received, reason=reason)
    left = replace(left, relays=state.relays.without(gone))
    return _advance(left) if epoch.members else replace(left, phase=PublicationPhase.COMMITTED)


def _dissolved(epoch: Epoch, gone: Set[str]) -> Epoch:
    """Leave members out of an epoch, and the others in it without a collective."""
    remain = [each for each in epoch.members if each.service_id not in gone]
    return replace(epoch, members=tuple(each.model_copy(update={"rank": None}) for each in remain), rendezvous=None)


def breaks_epoch(event: NegotiationEvent, epoch: Epoch | None) -> bool:
    """Whether an event ends the use of an epoch that no publication is open in."""
    if isinstance(event, MemberGone) and epoch is not None:
        member = epoch.by_id.get(event.service_id)
        return member is not None and not member.is_relayed_to
    return epoch is not None and isinstance(event, SenderGone)


def view_of(experiment_id: str, negotiation: Negotiation, deadline_seconds: float) -> Publication:
    """Show a publication whose phases may take ``deadline_seconds`` each."""
    return Publication(
        experiment_id=experiment_id,
        version=negotiation.version,
        epoch=negotiation.epoch.number,
        phase=negotiation.phase,
        members=negotiation.epoch.members,
        rendezvous=negotiation.epoch.rendezvous,
        deadline_seconds=deadline_seconds,
        reason=negotiation.reason,
        is_delta=negotiation.manifest.delta is not None,
    )


def is_alike(before: Negotiation, after: Negotiation) -> bool:
    """Whether only the progress of members differs: what they are asked to do, and what is stored, is the same."""
    return replace(before, joined=after.joined, received=after.received, relays=after.relays) == after


def order_of(
    service_id: str, negotiation: Negotiation, deadline_seconds: float, address_of: Callable[[str], str | None]
) -> PublicationOrder | None:
    """Make what a service has to do for a publication; None unless it is a member, whose turn has come.

    Args:
        address_of: finds a service's address; None if it is gone.
    """
    epoch = negotiation.epoch
    member, source = epoch.by_id.get(service_id), negotiation.relays.sources.get(service_id)
    if member is None or (member.is_relayed_to and source is None):
        return None
    names: Collection[str] = ()
    if source is not None and address_of(epoch.sender) is not None:
        # The last one is shown what only the sender may see.
        names = dict.fromkeys([source, epoch.sender])
    addresses = [address for name in names if (address := address_of(name)) is not None]
    passing_on = None if source is None else epoch.by_id.get(source)
    memory = None if passing_on is None or not addresses or len(addresses) < len(names) else passing_on.shared_memory
    return PublicationOrder(
        version=negotiation.version,
        epoch=negotiation.epoch.number,
        transport=member.transport,
        rank=member.rank,
        num_ranks=member.num_ranks,
        phase=negotiation.phase,
        rendezvous=negotiation.epoch.rendezvous,
        manifest=negotiation.manifest,
        deadline_seconds=deadline_seconds,
        sources=tuple(url_at(address, negotiation.version) for address in addresses),
        may_map=memory is not None and memory == member.shared_memory,
    )


def newest_of(records: Sequence[PublicationRecord]) -> PublicationRecord:
    """Find what was announced last, among one record or more: the one that is open, else that of the last epoch.

    Epochs are numbered in the order of time, and within one the versions grow; the wall clock may go back, and so may
    versions, when a trainer continues from an earlier checkpoint.
    """
    return max(records, key=lambda record: (record.ended_at is None, record.epoch, record.version))


def negotiation_of(record: PublicationRecord) -> Negotiation:
    """Rebuild the state that a record describes; members report again how far they are."""
    members = tuple(Member.model_validate(member) for member in record.members)
    rendezvous = Rendezvous.model_validate(record.rendezvous) if record.rendezvous else None
    epoch = Epoch(record.epoch, record.service_id, members, rendezvous)
    return Negotiation(
        version=record.version,
        step=record.step,
        manifest=Manifest.model_validate(record.manifest),
        epoch=epoch,
        phase=PublicationPhase(record.phase),
        reason=record.reason,
        relays=Relays.of(epoch.members, epoch.sender),
    )
