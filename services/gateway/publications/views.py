"""What the trainer and a member see of a publication. Pure."""

from flotilla.services.gateway.publications.negotiation import Negotiation
from flotilla.shared.schemas.publication import Publication, PublicationOrder


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


def order_of(service_id: str, negotiation: Negotiation, deadline_seconds: float) -> PublicationOrder | None:
    """Make what a service has to do for a publication; None unless it is a member."""
    member = next((each for each in negotiation.epoch.members if each.service_id == service_id), None)
    if member is None:
        return None
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
    )
