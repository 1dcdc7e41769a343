"""Which sandbox an experiment's services run code in."""

import os

from flotilla.shared.errors import Unavailable
from flotilla.shared.net.client.client import GatewayClient
from flotilla.shared.schemas.experiment import Page
from flotilla.shared.schemas.service import ServiceView


async def sandbox_address(client: GatewayClient, experiment_id: str) -> str:
    """Find a sandbox of the experiment, or any while it has none; several processes spread over several.

    Raises:
        Unavailable: there is none now: it may have been killed a moment ago.
    """
    page = await client.call("GET", "/v1/services", params={"kind": "sandbox", "limit": 100})
    views = Page[ServiceView].model_validate(page).items
    usable = [view for view in views if view.experiment_id == experiment_id] or views
    if not usable:
        raise Unavailable("the experiment runs code, which needs a sandbox service, and the fleet has none now")
    return usable[os.getpid() % len(usable)].address
