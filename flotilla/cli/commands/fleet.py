"""``flotilla up``, ``down`` and ``status``: a fleet that stays."""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from rich.table import Table

from flotilla.cli.fleet import FleetOptions, LocalFleet
from flotilla.cli.output import new_console, write_json
from flotilla.connection import FLEET_FILE, FleetInfo, is_running, open_client
from shared.errors import Conflict, FlotillaError, Unavailable
from shared.processes import python_module
from shared.schemas.experiment import Page
from shared.schemas.fleet import FleetView
from shared.schemas.service import ServiceKind

DOWN_SECONDS = 40.0
DETACH_SECONDS = 100.0


async def up(arguments: argparse.Namespace) -> int:
    """Start a fleet and stay, or leave it running with ``--detach``."""
    console = new_console()
    data = Path(arguments.data)
    if arguments.detach:
        return await _detach(arguments, data)
    options = FleetOptions(
        data=data,
        num_rollouts=arguments.rollouts or 1,
        num_trainers=arguments.trainers or 1,
        num_rewards=arguments.rewards or 1,
        num_sandboxes=0 if arguments.no_sandbox else arguments.sandboxes or 1,
        host=arguments.host,
        port=arguments.port,
        redis_url=arguments.redis_url,
        log_level=arguments.log_level,
    )
    async with LocalFleet(options, lambda line: console.print(line, markup=False)) as fleet:
        console.print(f"gateway    {fleet.gateway_url}   token in {data / 'token'}   logs in {data / 'logs'}")
        console.print("the fleet is up; Ctrl-C ends it")
        while True:
            fleet.check()
            await asyncio.sleep(0.5)


async def _detach(arguments: argparse.Namespace, data: Path) -> int:
    console = new_console()
    running: FleetInfo | None = None
    with contextlib.suppress(Unavailable):
        running = FleetInfo.read(data)
    if running is not None:
        raise Conflict(f"a fleet runs already with the data directory {data} (pid {running.pid})")
    log_path = _make_log(data)
    rest = [argument for argument in sys.argv[1:] if argument not in {"--detach", "-d"}]
    with log_path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *python_module("flotilla", *rest),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "NO_COLOR": "1"},
        )
    end = time.monotonic() + DETACH_SECONDS
    while time.monotonic() < end:
        if process.returncode is not None:
            raise Unavailable(f"the fleet did not start: {_last_line(log_path)}")
        with contextlib.suppress(Unavailable):
            info = FleetInfo.read(data)
            if info.pid == process.pid:
                console.print(f"the fleet is up: {info.gateway_url} (pid {info.pid}); `flotilla down` ends it")
                return 0
        await asyncio.sleep(0.2)
    process.terminate()
    raise Unavailable(f"the fleet did not come up within {DETACH_SECONDS:.0f} s; see {log_path}")


def _make_log(data: Path) -> Path:
    log_path = data / "logs" / "fleet.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    return log_path


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


async def down(arguments: argparse.Namespace) -> int:
    """End the fleet of a data directory."""
    console = new_console()
    info = FleetInfo.read(Path(arguments.data))
    os.kill(info.pid, signal.SIGTERM)
    end = time.monotonic() + DOWN_SECONDS
    while is_running(info.pid):
        if time.monotonic() > end:
            raise Unavailable(f"the fleet (pid {info.pid}) did not end within {DOWN_SECONDS:.0f} s")
        await asyncio.sleep(0.1)
    console.print(f"the fleet of {info.data} is down")
    return 0


async def status(arguments: argparse.Namespace) -> int:
    """List services and experiments."""
    async with open_client(arguments.gateway, Path(arguments.data)) as client:
        services = Page.model_validate(await client.call("GET", "/v1/services", params={"limit": 1000})).items
        fleet = FleetView.model_validate(await client.call("GET", "/v1/fleet"))
        experiments = Page.model_validate(await client.call("GET", "/v1/experiments", params={"limit": 1000})).items
        content = {
            "gateway": {"address": client.base_url, **_fleet_process(Path(arguments.data))},
            "services": [_service(service) for service in services],
            "experiments": [
                {key: each[key] for key in ("id", "name", "state", "step", "total_steps", "policy_version", "problem")}
                for each in experiments
            ],
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
    table = Table("kind", "id", "pid", "address", "state", "experiment", "version")
    for each in content["services"]:
        version = "" if each["policy_version"] is None else str(each["policy_version"])
        cells = (each["kind"], each["id"], str(each["pid"]), each["address"], each["state"], each["experiment"] or "")
        table.add_row(*cells, version)
    console.print(table)
    if content["experiments"]:
        table = Table("experiment", "id", "state", "step", "version", "problem")
        for each in content["experiments"]:
            problem = f"{each['problem']['component']}: {each['problem']['cause']}" if each["problem"] else ""
            step = f"{each['step']}/{each['total_steps']}"
            table.add_row(each["name"], each["id"], each["state"], step, str(each["policy_version"]), problem)
        console.print(table)
    if content["shares"]:
        console.print(_shares(content["shares"]))


def _shares(shares: list[dict[str, Any]]) -> Table:
    """Show what each active experiment has of the fleet, what it should have, and what it waits for."""
    kinds = [kind.value for kind in ServiceKind if any(kind.value in share["kinds"] for share in shares)]
    table = Table("shares of", "weight", "priority", *(f"{kind}s" for kind in kinds), "waiting for")
    for share in shares:
        cells = [_share(share["kinds"].get(kind)) for kind in kinds]
        waiting = (share["waiting"] or "").removeprefix("waiting for ")
        table.add_row(share["experiment_id"], f"{share['weight']:g}", str(share["priority"]), *cells, waiting)
    return table


def _share(share: dict[str, Any] | None) -> str:
    """Such as ``2 of 3 (1 to 4)``: it has two, should have three, and asks for one to four."""
    if share is None:
        return ""
    most = "any" if share["max"] is None else share["max"]
    leaving = f", {len(share['leaving'])} leaving" if share["leaving"] else ""
    return f"{len(share['services'])} of {share['share']} ({share['min']} to {most}){leaving}"
