"""Publications as rows, and which row of an experiment is the newest."""

from collections.abc import Sequence

from flotilla.services.gateway.publications.epochs import Epoch
from flotilla.services.gateway.publications.negotiation import Negotiation
from flotilla.services.gateway.store.records import PublicationRecord
from flotilla.shared.schemas.publication import Manifest, Member, PublicationPhase, Rendezvous


def newest_of(records: Sequence[PublicationRecord]) -> PublicationRecord:
    """Find what was announced last, among one record or more: the one that is open, else that of the last epoch.

    Epochs are numbered in the order of time, and within one the versions grow; the wall clock may go back, and so may
    versions, when a trainer goes on from an earlier checkpoint.
    """
    return max(records, key=lambda record: (record.ended_at is None, record.epoch, record.version))


def record_of(experiment_id: str, negotiation: Negotiation, announced_at: float, now: float) -> PublicationRecord:
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


def negotiation_of(record: PublicationRecord) -> Negotiation:
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
