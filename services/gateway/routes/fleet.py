"""Which service works for which experiment."""

from fastapi import APIRouter

from flotilla.services.gateway.routes.dependencies import Gateway
from flotilla.shared.schemas.checks import FleetExamination
from flotilla.shared.schemas.fleet import FleetView

router = APIRouter(prefix="/fleet", tags=["services"])


@router.get("")
async def show(gateway: Gateway) -> FleetView:
    """Show what each active experiment has of the fleet, what it should have, and what it waits for."""
    return gateway.scheduler.view()


@router.post("/checks")
async def examine(gateway: Gateway) -> FleetExamination:
    """Let services of every host try to reach each other, Redis and the shared folder; takes half a minute at most.

    Raises:
        Conflict: the fleet is being examined already.
    """
    return await gateway.examinations.examine()
