"""``flotilla status``: services and experiments."""

import argparse
import contextlib
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import psutil
from pydantic import JsonValue
from rich.table import Table

from flotilla.cli.gateway import open_gateway
from flotilla.cli.health import names_of
from flotilla.cli.output import fitting, new_console, table_of, write_json
from flotilla.cli.reasons import first_words
from flotilla.connection import FLEET_FILE, FleetInfo
from flotilla.shared.errors import FlotillaError
from flotilla.shared.schemas.experiment import ExperimentShare, ExperimentView, KindShare
from flotilla.shared.schemas.service import Capabilities, Failure, ServiceKind, ServiceView
from flotilla.shared.schemas.tinker import TinkerLedger
from flotilla.shared.schemas.wire import Wire

GIGABYTE = 1024**3
EXPERIMENT_KEYS = (
    "id",
    "name",
    "state",
    "step",
    "total_steps",
    "policy_version",
    "problem",
    "origin",
    "health",
    "updated_at",
)
FORGOTTEN_AFTER = timedelta(days=1)
"""Problems of an experiment that ended longer ago are not listed; `ls` and `diagnose` still show them."""


class ServiceRow(Wire):
    """What is shown of a service."""

    id: str
    kind: str
    pid: int
    address: str
    state: str
    experiment: str | None
    leaving: str | None
    policy_version: int | None
    devices: str
    lease_expires_in_seconds: float
    failure: Failure | None
    pool: str = ""

    def cell(self, column: str) -> str:
        """Write what is in a column of this name."""
        value = getattr(self, column)
        return "" if value is None else str(value)


async def status(arguments: argparse.Namespace) -> int:
    """List services and experiments."""
    async with open_gateway(arguments) as client:
        services = [_row_of(service) for service in await client.services()]
        fleet = await client.fleet()
        experiments = await client.experiments()
        tinker = await client.tinker_ledgers()
    if arguments.json:
        write_json(
            {
                "gateway": {"address": client.base_url, **_fleet_process(Path(arguments.data))},
                "services": [service.model_dump(mode="json") for service in services],
                "experiments": [_experiment(each) for each in experiments],
                "shares": [share.model_dump(mode="json") for share in fleet.experiments],
                "tinker": [ledger.model_dump(mode="json") for ledger in tinker],
            }
        )
        return 0
    console = new_console()
    console.print(f"gateway {client.base_url}")
    console.print(fitting(console, partial(_services, services), ("pid", "address")))
    if experiments:
        console.print(experiments_table(experiments))
    if fleet.experiments:
        console.print(_shares(fleet.experiments))
    if tinker:
        console.print(_ledgers(tinker))
    for line in remarks(experiments, fleet.experiments, services):
        console.print(line, markup=False)
    return 0


def _ledgers(ledgers: Sequence[TinkerLedger]) -> Table:
    columns = ("accepted", "done", "failed", "waiting")
    rows = [[each.owner, *(str(getattr(each, name)) for name in columns)] for each in ledgers]
    return table_of(("tinker", *columns), rows, whole=("tinker",))


def _fleet_process(data: Path) -> dict[str, str | int]:
    with contextlib.suppress(FlotillaError, psutil.Error):
        info = FleetInfo.read(data)
        return {"fleet_pid": info.pid, "fleet_file": str(data / FLEET_FILE)}
    return {}


def _experiment(view: ExperimentView) -> dict[str, JsonValue]:
    fields = view.model_dump(mode="json", include=set(EXPERIMENT_KEYS))
    return {key: fields[key] for key in EXPERIMENT_KEYS}


def _row_of(service: ServiceView) -> ServiceRow:
    observed = service.observed
    return ServiceRow(
        id=service.service_id,
        kind=service.kind.value,
        pid=service.pid,
        address=service.address,
        state="draining" if service.is_draining else observed.state.value,
        experiment=service.experiment_id or observed.experiment_id,
        leaving=service.leaving,
        policy_version=observed.policy_version,
        devices=devices_of(service.capabilities),
        pool=service.capabilities.pool or "",
        lease_expires_in_seconds=service.lease_expires_in_seconds,
        failure=observed.failure,
    )


def devices_of(capabilities: Capabilities) -> str:
    """Name what a service computes on, such as ``cpu`` or ``cuda 0,1 (2 x 80 GB)``."""
    devices = capabilities.devices
    if not devices:
        return "cpu"
    sizes = Counter(round(each.memory_bytes / GIGABYTE) for each in devices if each.memory_bytes)
    facts = [f"{count} x {size} GB" for size, count in sizes.items()]
    facts += [] if capabilities.device == "cuda" else ["torch without CUDA"]
    named = ",".join(each.label for each in devices)
    return f"cuda {named} ({', '.join(facts)})" if facts else f"cuda {named}"


def _services(services: Sequence[ServiceRow], left_out: Sequence[str]) -> Table:
    columns = [
        name
        for name in ("kind", "id", "pid", "address", "state", "experiment", "devices", "pool", "policy_version")
        if name not in left_out
        and (name != "devices" or any(each.devices != "cpu" for each in services))
        and (name != "pool" or any(each.pool for each in services))
    ]
    rows = [[each.cell(name) for name in columns] for each in services]
    return table_of((*columns[:-1], "version"), rows, whole=("id", "address", "experiment"))


def experiments_table(experiments: Sequence[ExperimentView]) -> Table:
    """Show experiments, one row each."""
    columns = ("id", "name", "state", "step", "version", "from")
    rows = []
    for each in experiments:
        origin = f"{each.origin.experiment_id}@{each.origin.step}" if each.origin else ""
        rows.append((each.id, each.name, str(each.state), each.reached, str(each.policy_version), origin))
    return table_of(columns, rows, whole=("id", "state", "step", "from"))


def remarks(
    experiments: Sequence[ExperimentView],
    shares: Sequence[ExperimentShare],
    services: Sequence[ServiceRow] = (),
    *,
    now: datetime | None = None,
) -> list[str]:
    """List what is wrong with services and experiments and what these wait for, one line each: sentences do not fit
    into cells.

    Args:
        now: what experiments ended a day before it or earlier had wrong is left out; None: the time that it is.
    """
    lines = [
        f"failing  {each.id}: {each.failure.component}: {first_words(each.failure.cause)}"
        for each in services
        if each.failure
    ]
    told = set()
    for each in experiments:
        if _is_long_over(each, now or datetime.now(UTC)):
            continue
        if each.problem:
            lines.append(f"problem  {each.id}: {each.problem.component}: {each.problem.cause}")
            told.add((each.id, each.problem.cause))
        if each.health:
            lines.append(f"health   {each.id}: {names_of(each.health)}; see `flotilla diagnose {each.id}`")
    lines += [f"lending  {each.experiment_id}: {each.lending}" for each in shares if each.lending]
    return lines + [
        f"waiting  {each.experiment_id}: {each.waiting}"
        for each in shares
        if each.waiting and (each.experiment_id, each.waiting) not in told
    ]


def _is_long_over(experiment: ExperimentView, now: datetime) -> bool:
    return experiment.state.is_final and now - datetime.fromisoformat(experiment.updated_at) > FORGOTTEN_AFTER


def _shares(shares: Sequence[ExperimentShare]) -> Table:
    """Show what each active experiment has of the fleet, and what it should have."""
    kinds = [kind.value for kind in ServiceKind if any(kind.value in share.kinds for share in shares)]
    columns = ("shares of", "weight", "priority", *(f"{kind}s" for kind in kinds))
    rows = []
    for share in shares:
        cells = [_share(share.kinds.get(kind)) for kind in kinds]
        rows.append((share.experiment_id, f"{share.weight:g}", str(share.priority), *cells))
    return table_of(columns, rows, whole=("shares of",))


def _share(share: KindShare | None) -> str:
    """Such as ``2 of 3 (1 to 4)``: it has two, should have three, and asks for one to four."""
    if share is None:
        return ""
    most = "any" if share.max is None else share.max
    leaving = f", {len(share.leaving)} leaving" if share.leaving else ""
    return f"{len(share.services)} of {share.share} ({share.min} to {most}){leaving}"
