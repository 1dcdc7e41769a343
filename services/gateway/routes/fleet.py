"""Which service works for which experiment, how well they reach each other, and how long experiments are kept.

Tokens with an owner see the services that work for them, or for none, and their shares.
"""

import re

from fastapi import APIRouter

from flotilla.services.gateway.records.repository import owner_of
from flotilla.services.gateway.registry.services import LiveService
from flotilla.services.gateway.routes.dependencies import Caller, Gateway
from flotilla.services.gateway.state import GatewayState
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.net.authorisation.access import Principal
from flotilla.shared.schemas.checks import FleetExamination
from flotilla.shared.schemas.experiment import FleetView
from flotilla.shared.schemas.retention import PruneRequest, Pruning, Retention

ANOTHERS = "another owner's experiment"


def may_see(service: LiveService, caller: Principal, gateway: GatewayState) -> bool:
    """Whether a caller may see a service: what it works for, and has not yet released, is theirs."""
    if caller.owner is None:
        return True
    works_for = {service.experiment_id, service.observed.experiment_id} - {None}
    return all(owner_of(gateway.repository, each) == caller.owner for each in works_for if each is not None)


def fleet_of(view: FleetView, owner: str, gateway: GatewayState) -> FleetView:
    """Show an owner's part of the fleet; others' experiments, which theirs may wait for, without their ids."""
    foreign = [each for each in view.experiments if owner_of(gateway.repository, each.experiment_id) != owner]
    others = re.compile("|".join(re.escape(each.experiment_id) for each in foreign) or r"(?!)")
    own = [each for each in view.experiments if each not in foreign]
    shown = [
        each if each.waiting is None else each.model_copy(update={"waiting": others.sub(ANOTHERS, each.waiting)})
        for each in own
    ]
    return view.model_copy(update={"experiments": tuple(shown)})


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
