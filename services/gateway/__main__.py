"""Run the gateway: ``python -P -m flotilla.services.gateway``."""

import asyncio
import os
import sys
from pathlib import Path

from flotilla.shared.children.processes import collecting_later

with collecting_later():
    from flotilla.services.gateway.app import create_app
    from flotilla.services.gateway.settings import (
        ROLLOUT_SILENCE_SECONDS,
        SERVICE_SILENCE_SECONDS,
        STALL_SECONDS,
        GatewaySettings,
        read_quota,
    )
    from flotilla.services.gateway.store.sql import SqlStore
from flotilla.shared.children.processes import die_with_parent
from flotilla.shared.children.secret_variables import forget_secrets
from flotilla.shared.environment.settings import (
    allows_volatile_redis,
    read_for_libraries,
    read_settings,
    seconds_from,
    secret_from,
    token_from,
)
from flotilla.shared.errors import FlotillaError
from flotilla.shared.faults.armed import arm_process
from flotilla.shared.locations.allowed import read_places
from flotilla.shared.net.server.serving import address_of, bind, serve
from flotilla.shared.streams.redis.connection import check_server
from flotilla.shared.telemetry.logging import configure_logging
from flotilla.shared.telemetry.tracing.recording import trace_process

DEFAULT_PORT = 8470
CANNOT_START = 2


def main() -> int:
    """Read the settings, check what the gateway needs, serve until SIGTERM or SIGINT.

    Returns:
        0 after an orderly end; 2, with one sentence on standard error, if it cannot start.
    """
    try:
        common = read_settings(default_port=DEFAULT_PORT)
        configure_logging("gateway", common.log_level, common.log_format)
        arm_process("gateway")
        trace_process("gateway")
        if common.parent_pid is not None:
            die_with_parent(common.parent_pid)
        settings = GatewaySettings(
            token=common.token,
            redis_url=common.redis_url,
            data=common.data,
            service_token=token_from(os.environ, "FLOTILLA_SERVICE_TOKEN") or None,
            places=read_places(os.environ, common.data),
            database_url=secret_from(os.environ, "FLOTILLA_DATABASE_URL") or None,
            allow_volatile_redis=allows_volatile_redis(os.environ),
            quota=read_quota(os.environ),
            tinker_model=Path(os.environ["FLOTILLA_TINKER_MODEL"]) if os.environ.get("FLOTILLA_TINKER_MODEL") else None,
            stall_seconds=seconds_from(os.environ, "FLOTILLA_STALL_SECONDS", STALL_SECONDS),
            lease_seconds=seconds_from(os.environ, "FLOTILLA_SERVICE_SILENCE_SECONDS", SERVICE_SILENCE_SECONDS),
            rest_seconds=seconds_from(os.environ, "FLOTILLA_ROLLOUT_SILENCE_SECONDS", ROLLOUT_SILENCE_SECONDS),
        )
        read_for_libraries(os.environ)
        forget_secrets()
        listening = bind(common.host, common.port)
        with listening:
            # Before serving, so that what cannot be reached is said in one sentence.
            asyncio.run(check(settings))
            sys.stdout.write(f"{address_of(listening, common.tls.scheme)}\n")
            sys.stdout.flush()
            serve(create_app(settings), listening, tls=common.tls)
    except FlotillaError as error:
        sys.stderr.write(f"gateway cannot start: {error.detail}\n")
        return CANNOT_START
    except OSError as error:
        sys.stderr.write(f"gateway cannot start: {error}\n")
        return CANNOT_START
    return 0


async def check(settings: GatewaySettings) -> None:
    """Prove that the data plane and the database answer, and bring the database up to date."""
    await check_server(settings.redis_url, may_be_volatile=settings.allow_volatile_redis)
    settings.data.mkdir(mode=0o700, parents=True, exist_ok=True)
    store = await SqlStore.open(settings.resolved_database_url)
    await store.close()


if __name__ == "__main__":
    sys.exit(main())
