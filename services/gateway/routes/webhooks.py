"""How deliveries to the operator's web hooks go."""

from fastapi import APIRouter

from flotilla.services.gateway.routes.dependencies import Gateway
from flotilla.shared.schemas.experiment import Page
from flotilla.shared.schemas.webhooks import WebhookView

router = APIRouter(prefix="/webhooks", tags=["services"])


@router.get("")
async def webhooks(gateway: Gateway) -> Page[WebhookView]:
    """List the operator's web hooks, with how deliveries went since this gateway began; secrets are not shown."""
    return Page(items=gateway.events.webhooks.view(), next=None)
