"""What an experiment took of each pool of machines, and what that costs."""

from fastapi import APIRouter

from flotilla.services.gateway.monitoring.usage import usage_of
from flotilla.services.gateway.routes.dependencies import Gateway
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.schemas.costs import Usage, with_costs

router = APIRouter(prefix="/experiments/{experiment_id}", tags=["series"])


@router.get("/usage")
async def usage(experiment_id: str, gateway: Gateway) -> Usage:
    """Add up hours by pool, kind of service and device, and the tokens that were generated, trained and saved.

    With costs where the gateway has a list of prices (`FLOTILLA_PRICES`), or `costs_problem` where that has none for
    a pool or device.

    Raises:
        NotFound: there is no such experiment.
    """
    found = await usage_of(gateway.store, gateway.repository.get(experiment_id), gateway.clock.now())
    prices = gateway.settings.prices
    if prices is None:
        return found
    try:
        return with_costs(found, prices)
    except InvalidRequest as error:
        return found.model_copy(update={"costs_problem": error.detail})
