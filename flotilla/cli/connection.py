"""Which gateway a command talks to: the one named by the environment, else the fleet of the data directory."""

import argparse
import os
from pathlib import Path

from flotilla.cli.fleet import FleetInfo
from shared.client import GatewayClient
from shared.errors import Conflict, NotFound
from shared.schemas.experiment import ExperimentView, Page


def connect(arguments: argparse.Namespace) -> GatewayClient:
    """Make a client.

    Raises:
        Unavailable: no gateway is named and no fleet runs.
    """
    url = arguments.gateway or os.environ.get("FLOTILLA_GATEWAY_URL")
    if url:
        token_file = os.environ.get("FLOTILLA_TOKEN_FILE")
        token = os.environ.get("FLOTILLA_TOKEN") or (Path(token_file).read_text().strip() if token_file else None)
        return GatewayClient(url, token)
    info = FleetInfo.read(Path(arguments.data))
    return GatewayClient(info.gateway_url, info.token)


async def find_experiment(client: GatewayClient, reference: str | None) -> ExperimentView:
    """Find an experiment by id, by name, or the only one that is not final.

    Raises:
        NotFound: there is none.
        Conflict: there are several; the detail lists their ids.
    """
    page = Page.model_validate(await client.call("GET", "/v1/experiments", params={"limit": 1000}))
    views = [ExperimentView.model_validate(item) for item in page.items]
    if reference is None:
        found = [view for view in views if not view.state.is_final] or views[-1:]
    else:
        found = [view for view in views if view.id == reference] or [view for view in views if view.name == reference]
    if not found:
        raise NotFound(f"there is no experiment {reference!r}" if reference else "there is no experiment")
    if len(found) > 1:
        raise Conflict(f"several experiments match, say which id: {', '.join(view.id for view in found)}")
    return found[0]
