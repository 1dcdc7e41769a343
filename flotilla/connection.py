"""Which gateway a command or a client talks to: the one that is named, else the fleet of the data directory."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from shared.client import GatewayClient
from shared.errors import Conflict, NotFound, Unavailable
from shared.schemas.experiment import ExperimentView, Page

DEFAULT_DATA = ".flotilla"
FLEET_FILE = "fleet.json"


@dataclass(frozen=True, slots=True)
class FleetInfo:
    """Where a running fleet is found."""

    pid: int
    gateway_url: str
    token: str
    data: Path
    redis_url: str

    @classmethod
    def read(cls, data: Path) -> "FleetInfo":
        """Find the fleet of a data directory.

        Raises:
            Unavailable: none runs there.
        """
        try:
            content = json.loads((data / FLEET_FILE).read_text(encoding="utf-8"))
            info = cls(int(content["pid"]), content["gateway_url"], content["token"], data, content["redis_url"])
        except (OSError, ValueError, KeyError):
            raise Unavailable(f"no fleet runs with the data directory {data}: start one with `flotilla up`") from None
        if not is_running(info.pid):
            raise Unavailable(f"the fleet of {data} (pid {info.pid}) is gone: start one with `flotilla up`")
        return info


def is_running(pid: int) -> bool:
    """Whether a process lives (a zombie does not)."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def open_client(
    url: str | None, data: Path, *, token: str | None = None, environment: Mapping[str, str] = os.environ
) -> GatewayClient:
    """Make a client of a gateway; nothing is called yet.

    Args:
        url: the gateway's; None: ``FLOTILLA_GATEWAY_URL``, else the fleet of ``data``.
        data: data directory of a local fleet.
        token: for a gateway with a URL; None: ``FLOTILLA_TOKEN``, else the content of ``FLOTILLA_TOKEN_FILE``.
        environment: where the variables are read.

    Raises:
        Unavailable: no gateway is named and no fleet runs.
    """
    url = url or environment.get("FLOTILLA_GATEWAY_URL")
    if not url:
        info = FleetInfo.read(data)
        return GatewayClient(info.gateway_url, token or info.token)
    token = token or environment.get("FLOTILLA_TOKEN")
    token_file = environment.get("FLOTILLA_TOKEN_FILE")
    if not token and token_file:
        token = Path(token_file).read_text(encoding="utf-8").strip()
    return GatewayClient(url, token)


async def list_experiments(client: GatewayClient) -> list[ExperimentView]:
    """List all experiments, oldest first."""
    found: list[ExperimentView] = []
    after: str | None = None
    while True:
        page = Page.model_validate(await client.call("GET", "/v1/experiments", params={"limit": 1000, "after": after}))
        found += [ExperimentView.model_validate(item) for item in page.items]
        after = page.next
        if after is None:
            return found


async def find_experiment(client: GatewayClient, reference: str | None) -> ExperimentView:
    """Find an experiment by id, by name, or the only one that is not final.

    Raises:
        NotFound: there is none.
        Conflict: there are several; the detail lists their ids.
    """
    views = await list_experiments(client)
    if reference is None:
        found = [view for view in views if not view.state.is_final] or views[-1:]
    else:
        found = [view for view in views if view.id == reference] or [view for view in views if view.name == reference]
    if not found:
        raise NotFound(f"there is no experiment {reference!r}" if reference else "there is no experiment")
    if len(found) > 1:
        raise Conflict(f"several experiments match, say which id: {', '.join(view.id for view in found)}")
    return found[0]
