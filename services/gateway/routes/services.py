"""Services: register, exchange observed for desired state, drain, leave."""

from fastapi import APIRouter, Request, Response

from flotilla.services.gateway.membership.service_logs import LogQuery
from flotilla.services.gateway.routes.dependencies import Caller, Cursor, Gateway, Limit, Wait, page_of
from flotilla.services.gateway.routes.fleet import may_see
from flotilla.services.gateway.routes.trainer_calls import JSON, exchange, watching
from flotilla.shared.errors import Forbidden, NotFound
from flotilla.shared.net.authorisation.access import Scope
from flotilla.shared.schemas.checks import CheckReport
from flotilla.shared.schemas.experiment import Page
from flotilla.shared.schemas.logs import ServiceLogLines
from flotilla.shared.schemas.service import (
    DesiredState,
    DrainRequest,
    ObservedState,
    Registered,
    Registration,
    ServiceKind,
    ServiceView,
)
from flotilla.shared.service.logs import Containing, Count, Level

DEFAULT_NOTICE = DrainRequest()

router = APIRouter(prefix="/services", tags=["services"])


@router.post("", status_code=201)
async def register(registration: Registration, gateway: Gateway, request: Request) -> Registered:
    """Register a service; the same incarnation gets the same id again, and each time a pass of its own.

    Raises:
        Forbidden: the token is for services of another kind.
        Conflict: a service of another kind has this incarnation.
    """
    kind = request.state.shown.principal.kind
    if kind is not None and registration.kind is not kind:
        raise Forbidden(f"this token registers services of kind {kind}, not {registration.kind}")
    return await gateway.fleet.register(registration)


@router.put("/{service_id}/status", response_model=DesiredState)
async def report(
    service_id: str, observed: ObservedState, gateway: Gateway, request: Request, wait: Wait = 0.0
) -> Response:
    """Renew the lease, record the observed state, answer with the desired one.

    Answers at once when the desired state is not the acknowledged one, else when it changes or ``wait`` is over.

    Raises:
        NotFound: the service is not registered: it registers again.
    """
    # Calls in plain order do not come here: see StatusCalls.
    with watching(request.receive) as watch:
        return Response(await exchange(gateway, service_id, observed, wait, watch), media_type=JSON)


@router.post("/{service_id}/checks", status_code=204)
async def checked(service_id: str, report: CheckReport, gateway: Gateway) -> None:
    """Record what a service found while the fleet is examined.

    Raises:
        NotFound: it is not registered.
    """
    gateway.registry.get(service_id)
    gateway.examinations.report(service_id, report)


@router.post("/{service_id}/drain")
async def drain(service_id: str, gateway: Gateway, request: DrainRequest = DEFAULT_NOTICE) -> ServiceView:
    """Let a service finish the work it has in progress within a notice, hand the rest over, and leave.

    Raises:
        NotFound: it is not registered.
    """
    return gateway.registry.view(await gateway.fleet.drain(service_id, request.notice_seconds))


@router.delete("/{service_id}", status_code=204)
async def leave(service_id: str, gateway: Gateway) -> None:
    """Forget a service; what it had claimed is taken over by others.

    Raises:
        NotFound: it is not registered.
    """
    await gateway.fleet.leave(service_id, reason="it left")


@router.get("")
async def index(
    gateway: Gateway, caller: Caller, kind: ServiceKind | None = None, after: Cursor = None, limit: Limit = 100
) -> Page[ServiceView]:
    """List the services, or those of one kind, in the order of registration.

    To a service, sandboxes alone; to a token with an owner, those that work for nobody else.
    """
    kinds = set(ServiceKind) if kind is None else {kind}
    if caller.scope is Scope.SERVICE:
        kinds &= {ServiceKind.SANDBOX}
    services = [service for service in gateway.registry if service.kind in kinds and may_see(service, caller, gateway)]
    return page_of([(service.id, gateway.registry.view(service)) for service in services], after, limit)


@router.get("/{service_id}")
async def show(service_id: str, gateway: Gateway, caller: Caller) -> ServiceView:
    """Show a service.

    Raises:
        NotFound: it is not registered, or works for another than the token's owner.
    """
    service = gateway.registry.get(service_id)
    if not may_see(service, caller, gateway):
        raise NotFound(f"no service {service_id} works for an experiment of {caller.owner}", service_id=service_id)
    return gateway.registry.view(service)


@router.get("/{service_id}/logs")
async def logs(
    service_id: str, gateway: Gateway, level: Level = "debug", containing: Containing = "", lines: Count = 200
) -> ServiceLogLines:
    """List the newest lines that a service logged, whatever they belong to; ``gateway`` names the gateway.

    Raises:
        NotFound: it is not registered.
    """
    return await gateway.logs.of_service(service_id, LogQuery(level, containing, lines))
