"""Which service works for which experiment, how well they reach each other, and how long experiments are kept."""

from fastapi import APIRouter

from flotilla.services.gateway.routes.dependencies import Caller, Gateway
from flotilla.services.gateway.routes.ownership import fleet_of
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.schemas.checks import FleetExamination
from flotilla.shared.schemas.fleet import FleetView
from flotilla.shared.schemas.retention import PruneRequest, Pruning, Retention

router = APIRouter(prefix="/fleet", tags=["services"])


@router.get("")
async def show(gateway: Gateway, caller: Caller) -> FleetView:
    """Show what each active experiment has of the fleet, what it should have, and what it waits for.

    To a token with an owner the owner's alone.
    """
    view = gateway.scheduler.view()
    return view if caller.owner is None else fleet_of(view, caller.owner, gateway)


@router.post("/checks")
async def examine(gateway: Gateway) -> FleetExamination:
    """Let services of every host try to reach each other, Redis and the shared folder; takes half a minute at most.

    Raises:
        Conflict: the fleet is being examined already.
    """
    return await gateway.examinations.examine()


@router.post("/prunings")
async def prune(request: PruneRequest, gateway: Gateway) -> Pruning:
    """Delete what finished experiments left and is kept no longer, or only say what that is.

    Nothing goes that an experiment which stays began from, or that its spec names.

    Raises:
        InvalidRequest: neither the request nor the gateway's settings say how long anything is kept.
        Conflict: that is being done already.
    """
    given = Retention(**request.model_dump(exclude={"dry_run"}))
    retention = given if given.is_set else gateway.settings.retention
    if not retention.is_set:
        raise InvalidRequest(
            "nothing says how long what is kept: give run_days, checkpoints_days, samples_days, logs_days or "
            "max_bytes, or set FLOTILLA_RETENTION_RUN_DAYS or another of these of the gateway"
        )
    return await gateway.cleaning.retainer.prune(retention, dry_run=request.dry_run)
