"""Run the gateway: ``python -P -m flotilla.services.gateway [--standby]``."""

import argparse
import asyncio
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import uvloop

from flotilla.shared.children.processes import collecting_later

with collecting_later():
    from flotilla.services.gateway.app import create_app
    from flotilla.services.gateway.settings import (
        ROLLOUT_SILENCE_SECONDS,
        SERVICE_SILENCE_SECONDS,
        STALL_SECONDS,
        TAKEOVER_GRACE_SECONDS,
        GatewaySettings,
        read_price_list,
        read_quota,
        read_retention,
        read_webhooks,
    )
    from flotilla.services.gateway.standby import DatabaseWatch, StandbyGateway
    from flotilla.services.gateway.store.sql import SqlStore
from flotilla.shared.children.processes import die_with_parent
from flotilla.shared.environment.secret_variables import forget_secrets
from flotilla.shared.environment.settings import (
    ServiceSettings,
    allows_volatile_redis,
    read_for_libraries,
    read_settings,
    seconds_from,
    secret_from,
    token_from,
)
from flotilla.shared.errors import FlotillaError, InvalidRequest
from flotilla.shared.faults.armed import arm_process
from flotilla.shared.locations.allowed import read_places
from flotilla.shared.net.server.serving import address_of, bind, serve
from flotilla.shared.streams.redis.connection import check_server
from flotilla.shared.telemetry.logging import configure_logging
from flotilla.shared.telemetry.recent import KeepRecent
from flotilla.shared.telemetry.tracing.recording import trace_process

DEFAULT_PORT = 8470
CANNOT_START = 2


def main() -> int:
    """Read the settings, check what the gateway needs, serve until SIGTERM or SIGINT.

    Returns:
        0 after an orderly end; 2, with one sentence on standard error, if it cannot start.
    """
    parser = argparse.ArgumentParser(prog="python -P -m flotilla.services.gateway")
    parser.add_argument("--standby", action="store_true", help="wait while another gateway leads, then take its place")
    is_standby = parser.parse_args().standby
    try:
        common = read_settings(default_port=DEFAULT_PORT)
        configure_logging("gateway", common.log_level, common.log_format, also=KeepRecent("gateway"))
        arm_process("gateway")
        trace_process("gateway")
        if common.parent_pid is not None:
            die_with_parent(common.parent_pid)
        settings = settings_from(os.environ, common, is_standby=is_standby)
        read_for_libraries(os.environ)
        forget_secrets()
        listening = bind(common.host, common.port)
        with listening:
            address = address_of(listening, common.tls.scheme)
            settings = replace(settings, address=as_others_reach(address))
            # Before serving, so that what cannot be reached is said in one sentence.
            asyncio.run(check(settings))
            sys.stdout.write(f"{address}\n")
            sys.stdout.flush()
            app = create_app(settings)
            if is_standby:
                app = StandbyGateway(app, DatabaseWatch(settings.resolved_database_url), end=end_at_once)
            # Much of what the gateway does is to wake, read a few bytes and answer: this loop does it in C.
            serve(app, listening, tls=common.tls, new_loop=uvloop.new_event_loop)
    except FlotillaError as error:
        sys.stderr.write(f"gateway cannot start: {error.detail}\n")
        return CANNOT_START
    except OSError as error:
        sys.stderr.write(f"gateway cannot start: {error}\n")
        return CANNOT_START
    return 0


def settings_from(values: Mapping[str, str], common: ServiceSettings, *, is_standby: bool) -> GatewaySettings:
    """Read what a gateway needs besides what all services do.

    Raises:
        InvalidRequest: a variable is malformed, or a standby has no database that it could share.
    """
    settings = GatewaySettings(
        token=common.token,
        redis_url=common.redis_url,
        data=common.data,
        service_token=token_from(values, "FLOTILLA_SERVICE_TOKEN") or None,
        places=read_places(values, common.data),
        database_url=secret_from(values, "FLOTILLA_DATABASE_URL") or None,
        allow_volatile_redis=allows_volatile_redis(values),
        quota=read_quota(values),
        retention=read_retention(values),
        webhooks=read_webhooks(values),
        prices=read_price_list(values),
        tinker_model=Path(values["FLOTILLA_TINKER_MODEL"]) if values.get("FLOTILLA_TINKER_MODEL") else None,
        stall_seconds=seconds_from(values, "FLOTILLA_STALL_SECONDS", STALL_SECONDS),
        lease_seconds=seconds_from(values, "FLOTILLA_SERVICE_SILENCE_SECONDS", SERVICE_SILENCE_SECONDS),
        rest_seconds=seconds_from(values, "FLOTILLA_ROLLOUT_SILENCE_SECONDS", ROLLOUT_SILENCE_SECONDS),
        on_deposed=end_deposed,
    )
    if not is_standby:
        return settings
    if not (settings.database_url or "").startswith("postgres"):
        raise InvalidRequest("--standby needs the PostgreSQL database of all gateways: set FLOTILLA_DATABASE_URL")
    return replace(settings, has_standbys=True, grace_seconds=TAKEOVER_GRACE_SECONDS)


async def check(settings: GatewaySettings) -> None:
    """Prove that the data plane and the database answer, and bring the database up to date."""
    await check_server(settings.redis_url, may_be_volatile=settings.allow_volatile_redis)
    settings.data.mkdir(mode=0o700, parents=True, exist_ok=True)
    if settings.has_standbys:
        return  # another may work on the database, which a standby looks at without touching it
    store = await SqlStore.open(settings.resolved_database_url)
    await store.close()


def as_others_reach(address: str) -> str:
    """Name this host in an address that means all of its interfaces."""
    parts = urlsplit(address)
    if not ip_address(parts.hostname or "").is_unspecified:
        return address
    return f"{parts.scheme}://{socket.gethostname()}:{parts.port}"


def end_at_once(detail: str) -> None:
    """End this process at once with a message: its state is outdated, and must not be sent anywhere."""
    sys.stderr.write(f"gateway cannot go on: {detail}\n")
    sys.stderr.flush()
    os._exit(CANNOT_START)


def end_deposed() -> None:
    """End this process, whose place another gateway has taken."""
    end_at_once("another gateway has taken its place; start it again with --standby")


if __name__ == "__main__":
    sys.exit(main())
