"""What an experiment took of each pool of machines, and what that costs."""

from fastapi import APIRouter

from flotilla.services.gateway.monitoring.usage import usage_of
from flotilla.services.gateway.routes.dependencies import Gateway
from flotilla.shared.schemas.costs import Usage, priced

router = APIRouter(prefix="/experiments/{experiment_id}", tags=["series"])


@router.get("/usage")
async def usage(experiment_id: str, gateway: Gateway) -> Usage:
    """Add up hours by pool, kind of service and device, and the tokens that were generated, trained and saved.

    With costs where the gateway has a list of prices (`FLOTILLA_PRICES`).

    Raises:
        NotFound: there is no such experiment.
        InvalidRequest: a pool or device has no price in that list.
    """
    found = await usage_of(gateway.store, gateway.repository.get(experiment_id), gateway.clock.now())
    prices = gateway.settings.prices
    return found if prices is None else found.model_copy(update={"costs": priced(found, prices)})
