"""``flotilla status``: services and experiments."""

import argparse
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.table import Table

from flotilla.cli.health import names_of
from flotilla.cli.output import new_console, table_of, write_json
from flotilla.connection import FLEET_FILE, FleetInfo, open_client
from shared.errors import FlotillaError
from shared.schemas.experiment import Page
from shared.schemas.fleet import FleetView
from shared.schemas.service import ServiceKind

EXPERIMENT_KEYS = ("id", "name", "state", "step", "total_steps", "policy_version", "problem", "origin", "health")


async def status(arguments: argparse.Namespace) -> int:
    """List services and experiments."""
    async with open_client(arguments.gateway, Path(arguments.data)) as client:
        services = Page.model_validate(await client.call("GET", "/v1/services", params={"limit": 1000})).items
        fleet = FleetView.model_validate(await client.call("GET", "/v1/fleet"))
        experiments = Page.model_validate(await client.call("GET", "/v1/experiments", params={"limit": 1000})).items
        content = {
            "gateway": {"address": client.base_url, **_fleet_process(Path(arguments.data))},
            "services": [_service(service) for service in services],
            "experiments": [{key: each[key] for key in EXPERIMENT_KEYS} for each in experiments],
            "shares": [share.model_dump(mode="json") for share in fleet.experiments],
        }
    if arguments.json:
        write_json(content)
    else:
        _show(content)
    return 0


def _fleet_process(data: Path) -> dict[str, Any]:
    with contextlib.suppress(FlotillaError, psutil.Error):
        info = FleetInfo.read(data)
        return {"fleet_pid": info.pid, "fleet_file": str(data / FLEET_FILE)}
    return {}


def _service(service: Any) -> dict[str, Any]:
    observed = service["observed"]
    return {
        "id": service["service_id"],
        "kind": service["kind"],
        "pid": service["pid"],
        "address": service["address"],
        "state": "draining" if service["is_draining"] else observed["state"],
        "experiment": service["experiment_id"] or observed["experiment_id"],
        "leaving": service["leaving"],
        "policy_version": observed["policy_version"],
        "lease_expires_in_seconds": service["lease_expires_in_seconds"],
        "failure": observed["failure"],
    }


def _show(content: dict[str, Any]) -> None:
    console = new_console()
    console.print(f"gateway {content['gateway']['address']}")
    columns = ("kind", "id", "pid", "address", "state", "experiment", "policy_version")
    rows = [["" if each[name] is None else str(each[name]) for name in columns] for each in content["services"]]
    headings = (*columns[:-1], "version")
    console.print(table_of(headings, rows, whole=("id", "address", "experiment")))
    if content["experiments"]:
        console.print(experiments_table(content["experiments"]))
    if content["shares"]:
        console.print(_shares(content["shares"]))


def experiments_table(experiments: Sequence[Mapping[str, Any]]) -> Table:
    """Show experiments, one row each."""
    columns = ("id", "name", "state", "step", "version", "from", "problem", "health")
    rows = []
    for each in experiments:
        problem = f"{each['problem']['component']}: {each['problem']['cause']}" if each["problem"] else ""
        step = f"{each['step']}/{each['total_steps']}"
        origin = f"{each['origin']['experiment_id']}@{each['origin']['step']}" if each["origin"] else ""
        version, health = str(each["policy_version"]), names_of(each["health"])
        rows.append((each["id"], each["name"], each["state"], step, version, origin, problem, health))
    return table_of(columns, rows, whole=("id", "from"))


def _shares(shares: list[dict[str, Any]]) -> Table:
    """Show what each active experiment has of the fleet, what it should have, and what it waits for."""
    kinds = [kind.value for kind in ServiceKind if any(kind.value in share["kinds"] for share in shares)]
    columns = ("shares of", "weight", "priority", *(f"{kind}s" for kind in kinds), "waiting for")
    rows = []
    for share in shares:
        cells = [_share(share["kinds"].get(kind)) for kind in kinds]
        waiting = (share["waiting"] or "").removeprefix("waiting for ")
        rows.append((share["experiment_id"], f"{share['weight']:g}", str(share["priority"]), *cells, waiting))
    return table_of(columns, rows, whole=("shares of",))


def _share(share: dict[str, Any] | None) -> str:
    """Such as ``2 of 3 (1 to 4)``: it has two, should have three, and asks for one to four."""
    if share is None:
        return ""
    most = "any" if share["max"] is None else share["max"]
    leaving = f", {len(share['leaving'])} leaving" if share["leaving"] else ""
    return f"{len(share['services'])} of {share['share']} ({share['min']} to {most}){leaving}"
