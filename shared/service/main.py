"""What the ``__main__`` of a service does; called by nothing else."""

import gc
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from fastapi import FastAPI

from flotilla.shared.children.processes import die_with_parent, end_after
from flotilla.shared.environment.secret_variables import forget_secrets
from flotilla.shared.environment.settings import ServiceSettings, gateway_urls, read_for_libraries, read_settings
from flotilla.shared.errors import FlotillaError
from flotilla.shared.faults.armed import arm_process
from flotilla.shared.net.server.ports import address_towards, check_can_be_told
from flotilla.shared.net.server.serving import NOTICE, NewLoop, address_of, bind, serve_several
from flotilla.shared.service.app import leave
from flotilla.shared.service.devices import limit_devices
from flotilla.shared.service.notices import Departure, watch_notices
from flotilla.shared.telemetry.logging import configure_logging
from flotilla.shared.telemetry.recent import KeepRecent
from flotilla.shared.telemetry.tracing.recording import trace_process

CANNOT_START = 2


def run_service(
    name: str,
    create_app: Callable[[ServiceSettings, str], FastAPI],
    *,
    needs_redis: bool = True,
    serves_several: bool = False,
    new_loop: NewLoop | None = None,
) -> int:
    """Read the settings, configure logging, bind, serve until a signal ends it.

    Args:
        name: of the service, in its log lines and refusals.
        create_app: makes the app from the settings and the address that it is reached at.
        needs_redis: whether it uses the data plane, and so needs its address.
        serves_several: whether one process may serve several experiments, as many as ``FLOTILLA_EXPERIMENTS`` says,
            and is a service for each.
        new_loop: makes the event loop; None: asyncio's own.

    Returns:
        0 after an orderly end; 2, with one sentence on standard error, if it cannot start.
    """
    try:
        settings = read_settings(needs_redis=needs_redis)
        read_for_libraries(os.environ)
        forget_secrets()
        if not os.environ.get("FLOTILLA_HOST"):
            settings = replace(settings, host=address_towards(gateway_urls(settings.gateway_url)[0]))
        limit_devices()
        if settings.parent_pid is not None:
            die_with_parent(settings.parent_pid)
        if settings.fleet_pid is not None:
            end_after(settings.fleet_pid)
        configure_logging(name, settings.log_level, settings.log_format, also=KeepRecent(name))
        arm_process(name)
        trace_process(name)
        apps: list[tuple[FastAPI, socket.socket]] = []
        for number in range(settings.experiments if serves_several else 1):
            listening = bind(settings.host, settings.port + number if settings.port else 0)
            check_can_be_told(listening, f"FLOTILLA_HOST={settings.host}")
            apps.append((create_app(settings, address_of(listening, settings.tls.scheme)), listening))
        departure = Departure(settings.notice_seconds)
        stop = None
        if settings.notices is not None:
            # Until the service exists and can leave; the notice is repeated.
            signal.signal(NOTICE, signal.SIG_IGN)
            stop = watch_notices(settings.notices, departure.hear)
        try:
            serve_several(apps, lambda: partial(leave, departure.begin()), settings.tls, new_loop)
        finally:
            if stop is not None:
                stop()
    except FlotillaError as error:
        sys.stderr.write(f"{name}: {error.detail}\n")
        return CANNOT_START
    # The interpreter would look for cycles among a quarter of a million objects before it ends: seconds of a notice.
    gc.freeze()
    return 0
