"""Publications: how a trainer announces a version and follows its transfer."""

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field

from flotilla.services.gateway.publications.negotiation import Opened, SendFailed, Sent
from flotilla.services.gateway.routes.dependencies import OF_TRAINER, Cursor, Gateway, Limit, Trainer, Wait, page_of
from flotilla.shared.schemas.experiment import Page
from flotilla.shared.schemas.publication import Publication, PublicationPhase, PublicationRequest, Rendezvous
from flotilla.shared.schemas.wire import TolerantWire

router = APIRouter(prefix="/experiments/{experiment_id}/publications", tags=["publications"])


class SentReport(TolerantWire):
    """The sender is done with an epoch."""

    epoch: int = Field(ge=1)
    checksum: str


class FailedReport(TolerantWire):
    """The sender could not send in an epoch."""

    epoch: int = Field(ge=1)
    detail: str = Field(max_length=2000)


@router.post("", status_code=201)
async def announce(
    experiment_id: str, request: PublicationRequest, trainer: Trainer, gateway: Gateway, wait: Wait = 0.0
) -> Publication:
    """Announce a policy version's weights; every member confirms before the first collective.

    Where nothing is sent, since all members map the image, the answer may ``wait`` for their next phase.

    Raises:
        StalePolicyVersion: the version is not newer than the current one.
        Conflict: the experiment is not active, or has no trainer.
        NotAssigned: the caller is not its trainer, or was it in an earlier epoch.
        Unavailable: the gateway has just started and has not heard from every rollout; try again.
    """
    publication = await gateway.publications.announce(experiment_id, trainer, request)
    wait = min(wait, gateway.settings.longest_wait_seconds)
    if wait <= 0 or any(member.rank is not None for member in publication.members):
        return publication
    phase, epoch = publication.phase, publication.epoch
    return await gateway.publications.get(
        experiment_id, publication.version, wait_seconds=wait, phase=phase, epoch=epoch
    )


@router.get("")
async def index(experiment_id: str, gateway: Gateway, after: Cursor = None, limit: Limit = 100) -> Page[Publication]:
    """List an experiment's publications by version."""
    gateway.repository.get(experiment_id)
    publications = await gateway.publications.all(experiment_id)
    return page_of([(str(each.version), each) for each in publications], after, limit)


@router.put("/{version}/rendezvous", dependencies=[OF_TRAINER])
async def open_epoch(experiment_id: str, version: int, rendezvous: Rendezvous, gateway: Gateway) -> Publication:
    """Record where the present epoch meets; a rendezvous of another epoch changes nothing.

    Raises:
        NotFound: the version was never announced.
        NotAssigned: the caller is a service, and not the experiment's trainer now.
    """
    return await gateway.publications.apply_to_version(experiment_id, version, Opened(rendezvous))


@router.get("/{version}", dependencies=[OF_TRAINER])
async def show(
    experiment_id: str,
    version: int,
    gateway: Gateway,
    wait: Wait = 0.0,
    phase: Annotated[PublicationPhase | None, Query(description="wait while it is in this phase")] = None,
    epoch: Annotated[int | None, Query(description="wait while it is at this epoch")] = None,
) -> Publication:
    """Show a publication; with ``phase`` or ``epoch``, as soon as it is at another one.

    Raises:
        NotFound: the version was never announced.
        NotAssigned: the caller is a service, and not the experiment's trainer now.
    """
    wait = min(wait, gateway.settings.longest_wait_seconds)
    return await gateway.publications.get(experiment_id, version, wait_seconds=wait, phase=phase, epoch=epoch)


@router.post("/{version}/sent", dependencies=[OF_TRAINER])
async def sent(experiment_id: str, version: int, report: SentReport, gateway: Gateway) -> Publication:
    """Record that the sender is done with an epoch.

    Raises:
        NotFound: the version was never announced.
        NotAssigned: the caller is a service, and not the experiment's trainer now.
    """
    return await gateway.publications.apply_to_version(experiment_id, version, Sent(report.epoch, report.checksum))


@router.post("/{version}/failed", dependencies=[OF_TRAINER])
async def failed(experiment_id: str, version: int, report: FailedReport, gateway: Gateway) -> Publication:
    """Record that the sender could not send: the epoch is closed and the next one is opened.

    Raises:
        NotFound: the version was never announced.
        NotAssigned: the caller is a service, and not the experiment's trainer now.
    """
    return await gateway.publications.apply_to_version(experiment_id, version, SendFailed(report.epoch, report.detail))
