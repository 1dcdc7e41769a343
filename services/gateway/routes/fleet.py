"""Which service works for which experiment."""

from fastapi import APIRouter

from flotilla.services.gateway.routes.dependencies import Gateway
from flotilla.shared.schemas.fleet import FleetView

router = APIRouter(prefix="/fleet", tags=["services"])


@router.get("")
async def show(gateway: Gateway) -> FleetView:
    """Show what each active experiment has of the fleet, what it should have, and what it waits for."""
    return gateway.scheduler.view()
