"""What a rollout service opens at start-up."""

import contextlib
import os
import secrets
import socket
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from shared.weights.pull import pull_image

from services.rollout.crew import CrewOpener
from services.rollout.service import RolloutService
from shared.client import GatewayClient
from shared.membership import Membership
from shared.schemas.service import Capabilities, Registration, ServiceKind
from shared.service_app import at_work
from shared.settings import ServiceSettings
from shared.streams.connection import connect
from shared.streams.settings import StreamsConfig
from shared.weights.image import sweep


@dataclass(frozen=True, slots=True)
class RolloutState:
    """See ``shared.service_app.ServiceState``."""

    service: RolloutService
    membership: Membership


@contextlib.asynccontextmanager
async def open_state(settings: ServiceSettings, address: str) -> AsyncIterator[RolloutState]:
    """Open the data plane's client, the service and its membership; close them in reverse order."""
    sweep()
    async with contextlib.AsyncExitStack() as stack:
        redis = connect(settings.redis_url)
        stack.push_async_callback(redis.aclose)
        client = await stack.enter_async_context(GatewayClient(settings.gateway_url, settings.token))
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flotilla-rollout-")))

        async def pull(url: str, version: int, directory: Path, deadline_seconds: float) -> Path:
            return await pull_image(url, settings.token, version, directory, deadline_seconds)

        opener = CrewOpener(
            redis=redis,
            service_name=f"rollout-{os.getpid()}",
            streams=StreamsConfig(lease_seconds=settings.lease_seconds),
            pull=pull,
            directory=directory,
            host=settings.host,
        )
        service = RolloutService(opener)
        registration = Registration(
            kind=ServiceKind.ROLLOUT,
            address=address,
            host=socket.gethostname(),
            pid=os.getpid(),
            capabilities=Capabilities(
                engine="torch",
                cores=os.cpu_count() or 1,
                memory_bytes=psutil.virtual_memory().total,
                transports=("gloo", "pull"),
            ),
            incarnation=secrets.token_hex(8),
        )
        membership = Membership(client, registration, service.observe, service.apply)
        await stack.enter_async_context(at_work(service, membership))
        yield RolloutState(service, membership)
