"""What a trainer service opens at start-up. No torch here: only the worker needs it."""

import asyncio
import contextlib
import os
import secrets
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

from flotilla.services.trainer.supervisor.process import WorkerHandle
from flotilla.services.trainer.supervisor.served_images import ServedImages
from flotilla.services.trainer.supervisor.supervisor import Addresses, StartWorker, Supervisor
from flotilla.shared.environment.settings import ServiceSettings
from flotilla.shared.net.authorisation.tokens import Credentials
from flotilla.shared.net.client.client import GatewayClient
from flotilla.shared.schemas.service import Registration, ServiceKind
from flotilla.shared.service.app import at_work
from flotilla.shared.service.devices import host_capabilities
from flotilla.shared.service.membership import Membership
from flotilla.shared.telemetry.logging import format_for
from flotilla.shared.weights.image.files import shared_memory_identity

POLL_SECONDS = 5.0
"""Shorter than others': all steps wait for a trainer whose host is cut off, until this timeout."""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """See ``flotilla.shared.service.app.ServiceState``."""

    service: Supervisor
    membership: Membership


@contextlib.asynccontextmanager
async def open_state(
    settings: ServiceSettings,
    address: str,
    images: ServedImages,
    credentials: Credentials,
    start_worker: StartWorker = WorkerHandle.start,
) -> AsyncIterator[TrainerState]:
    """Open the supervisor and its membership; close them in reverse order."""
    async with GatewayClient(settings.gateway_url, settings.token) as client:
        addresses = Addresses(
            gateway_url=settings.gateway_url,
            redis_url=settings.redis_url,
            host=settings.host,
            log_level=settings.log_level,
            log_format=format_for(settings.log_format, is_terminal=sys.stderr.isatty()),
        )
        service = Supervisor(addresses, images, service_id=lambda: membership.service_id, start_worker=start_worker)
        offered = await asyncio.to_thread(
            host_capabilities, transports=("gloo", "nccl", "pull", "relay"), shared_memory=shared_memory_identity()
        )
        registration = Registration(
            kind=ServiceKind.TRAINER,
            address=address,
            host=socket.gethostname(),
            pid=os.getpid(),
            capabilities=offered.model_copy(update={"live_changes": True}),
            incarnation=secrets.token_hex(8),
        )
        membership = Membership(
            client,
            registration,
            service.observe,
            service.apply,
            credentials=credentials,
            settings=settings,
            poll_seconds=POLL_SECONDS,
        )
        with images.served_directly(settings.host):
            async with at_work(service, membership):
                yield TrainerState(service, membership)
