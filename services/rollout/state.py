"""What a rollout service opens at start-up."""

import asyncio
import contextlib
import os
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial

from flotilla.services.rollout.custom_code import sandbox_address
from flotilla.services.rollout.engines.opening import offers
from flotilla.services.rollout.engines.servers.model import sweep_places
from flotilla.services.rollout.service import RolloutService
from flotilla.services.rollout.session import SessionOpener
from flotilla.services.rollout.task_source import TaskSource
from flotilla.services.rollout.tools.code_interpreter import Sandboxes
from flotilla.services.rollout.weights.sources import WeightSources
from flotilla.shared.environment.settings import ServiceSettings
from flotilla.shared.locations.allowed import read_places
from flotilla.shared.net.authorisation.tokens import Credentials
from flotilla.shared.net.client.client import GatewayClient
from flotilla.shared.schemas.service import Registration, ServiceKind
from flotilla.shared.service.app import at_work
from flotilla.shared.service.devices import host_capabilities
from flotilla.shared.service.membership import Membership
from flotilla.shared.streams.hop import StreamsConfig, holder_name
from flotilla.shared.streams.redis.connection import connect, silence
from flotilla.shared.weights.image.files import shared_memory_identity, sweep
from flotilla.shared.weights.pull.server import PublishedImages


@dataclass(frozen=True, slots=True)
class RolloutState:
    """See ``flotilla.shared.service.app.ServiceState``."""

    service: RolloutService
    membership: Membership


_SWEEPING = threading.Lock()
_swept: list[bool] = []


def _sweep() -> None:
    """Remove what dead processes left behind, once: what this one's services have made since is in use."""
    with _SWEEPING:
        if not _swept:
            sweep()
            sweep_places()
            _swept.append(True)


@contextlib.asynccontextmanager
async def open_state(
    settings: ServiceSettings,
    address: str,
    credentials: Credentials,
    published: PublishedImages,
    make_opener: Callable[..., SessionOpener] = SessionOpener,
) -> AsyncIterator[RolloutState]:
    """Open the data plane's client, the service and its membership; close them in reverse order."""
    await asyncio.to_thread(_sweep)
    incarnation = secrets.token_hex(8)
    membership: Membership
    async with contextlib.AsyncExitStack() as stack:
        redis = connect(settings.redis_url)
        stack.push_async_callback(redis.aclose)
        client = await stack.enter_async_context(GatewayClient(settings.gateway_url, settings.token))
        opener = make_opener(
            tasks=TaskSource(
                redis,
                holder_name(ServiceKind.ROLLOUT, os.getpid(), incarnation),
                StreamsConfig(lease_seconds=settings.lease_seconds),
            ),
            weights=WeightSources.of_fleet(credentials, published),
            host=settings.host,
            service_id=lambda: membership.service_id or "",
            pool=settings.pool,
            engine_pythons=settings.engine_pythons,
            places=read_places(os.environ, settings.data),
            gateway_url=settings.gateway_url,
            sandboxes=lambda experiment_id: Sandboxes(
                lambda: sandbox_address(client, experiment_id),
                lambda: credentials.for_peer(ServiceKind.SANDBOX),
                experiment_id,
            ),
        )
        service = RolloutService(opener)
        found = await asyncio.to_thread(
            host_capabilities, transports=("gloo", "nccl", "pull", "relay"), shared_memory=shared_memory_identity()
        )
        engines = offers(settings.engine_pythons, has_gpus=bool(found.devices))
        registration = Registration(
            kind=ServiceKind.ROLLOUT,
            address=address,
            host=socket.gethostname(),
            pid=os.getpid(),
            capabilities=found.model_copy(update={"engines": engines, "live_changes": True}),
            incarnation=incarnation,
        )
        membership = Membership(
            client,
            registration,
            service.observe,
            service.apply,
            credentials=credentials,
            gauges=partial(silence, redis),
            settings=settings,
        )
        stack.enter_context(published.served_directly(settings.host))
        await stack.enter_async_context(at_work(service, membership))
        yield RolloutState(service, membership)
