"""``flotilla rollout`` and ``flotilla drain``: rollouts join a fleet that runs, and leave it."""

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path

from flotilla.cli.fleet import service_environment
from flotilla.cli.gateway import open_gateway
from flotilla.cli.output import new_console
from flotilla.client.asynchronous import AsyncClient
from flotilla.connection import FleetInfo
from flotilla.packages import check_packages
from flotilla.shared.children.processes import python_module
from flotilla.shared.environment.settings import EXPERIMENTS, secret_from
from flotilla.shared.errors import InvalidRequest, NotFound, Unavailable
from flotilla.shared.net.authorisation.access import PassKey
from flotilla.shared.schemas.service import POOL, ServiceKind, ServiceView, notices_from, pool_from

PATIENCE_SECONDS = 15.0
"""How much longer than its grace period a service may take to leave."""
POLL_SECONDS = 0.1


async def rollout(arguments: argparse.Namespace) -> int:
    """Become a rollout service of a running fleet, until a signal; never returns unless it cannot.

    Raises:
        Unavailable: no gateway is named and no fleet runs, or a package is missing.
        InvalidRequest: a gateway is named, but not the data plane's server; or the pool is no name.
    """
    check_packages()
    if arguments.gateway or os.environ.get("FLOTILLA_GATEWAY_URL"):
        environment = dict(os.environ)
        if arguments.gateway:
            environment["FLOTILLA_GATEWAY_URL"] = arguments.gateway
        if not secret_from(environment, "FLOTILLA_REDIS_URL"):
            raise InvalidRequest("FLOTILLA_REDIS_URL must name the fleet's Redis server, beside its gateway")
    else:
        info = FleetInfo.read(Path(arguments.data))
        own = {"FLOTILLA_NOTICE_SECONDS": os.environ.get("FLOTILLA_NOTICE_SECONDS", "")}
        # It is of no use to another fleet: the next one has another token.
        own |= {"FLOTILLA_FLEET_PID": str(info.pid)}
        token = PassKey(info.token).joining(ServiceKind.ROLLOUT)
        environment = service_environment(info.gateway_url, token, info.redis_url, info.data) | own
        del environment["FLOTILLA_PARENT_PID"]
    if arguments.notice is not None:
        environment["FLOTILLA_NOTICE_SECONDS"] = str(arguments.notice)
    if arguments.experiments is not None:
        environment[EXPERIMENTS] = str(arguments.experiments)
    if not environment.get("FLOTILLA_NOTICE_SECONDS"):
        environment.pop("FLOTILLA_NOTICE_SECONDS", None)
    if arguments.pool is not None:
        environment[POOL] = arguments.pool
    pool_from(environment)
    notices_from(environment)
    sys.stdout.flush()
    # This process becomes the service, so that signals to it are signals to the service.
    os.execve(sys.executable, python_module("flotilla.services.rollout"), environment)  # noqa: S606


async def drain(arguments: argparse.Namespace) -> int:
    """Let a service leave within a grace period, and wait until it has left.

    Raises:
        NotFound: there is no such service.
        Unavailable: it was not gone in time.
    """
    console = new_console()
    async with open_gateway(arguments) as client:
        started = time.monotonic()
        view = await client.drain(arguments.service, arguments.notice)
        notice = view.notice_ends_in_seconds or 0.0
        console.print(f"{view.service_id} leaves within {notice:.0f} s", markup=False)
        last = await _until_gone(client, view, started + notice + PATIENCE_SECONDS)
        groups, tokens = (int(last.observed.load.get(f"{name}_handed_over", 0)) for name in ("groups", "tokens"))
        handed_over = f"it handed over {groups} groups with {tokens} tokens"
        seconds = time.monotonic() - started
        console.print(f"{view.service_id} has left after {seconds:.1f} s; {handed_over}", markup=False)
    return 0


async def _until_gone(client: AsyncClient, view: ServiceView, end: float) -> ServiceView:
    last = view
    while time.monotonic() < end:
        try:
            last = await client.service(view.service_id)
        except NotFound:
            return last
        # Only rollouts end by themselves: their work is what can be handed over.
        if last.kind is not ServiceKind.ROLLOUT and last.observed.experiment_id is None:
            return last
        await asyncio.sleep(POLL_SECONDS)
    state = last.observed.state
    raise Unavailable(f"{view.service_id} ({state}) has not left {PATIENCE_SECONDS:.0f} s after its notice")
