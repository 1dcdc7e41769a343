"""Opening a provider: its boxes are kept from the start, and those that a killed service left are taken away."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from flotilla.services.sandbox.boxes.executor import LANGUAGES, BoxExecutor
from flotilla.services.sandbox.boxes.keeper import Boxes, Kept
from flotilla.services.sandbox.isolation import Slot
from flotilla.services.sandbox.providers.base import owner_here
from flotilla.services.sandbox.providers.opening import open_provider
from flotilla.services.sandbox.running import Opened
from flotilla.services.sandbox.settings import SandboxSettings

log = logging.getLogger(__name__)


@asynccontextmanager
async def open_boxes(
    settings: SandboxSettings, num_slots: int, *, transport: httpx.AsyncBaseTransport | None = None
) -> AsyncIterator[Opened]:
    """Open the provider of a service. Turns and quotas are as on this machine: a slot is a box.

    Args:
        settings: of the service.
        num_slots: how many programs and sessions run at a time.
        transport: another one than sockets.

    Raises:
        InvalidRequest: the provider has no key.
        ProviderFailed: it refuses its key.
    """
    owner = owner_here()
    provider = open_provider(settings, owner, transport=transport)
    kept = Kept(
        settings.image,
        settings.warm,
        settings.box_start_seconds,
        settings.box_lifetime_seconds,
        memory_bytes=settings.limits.memory_bytes,
        processors=settings.processors,
        processes=settings.limits.processes,
        has_network=settings.box_network,
    )
    executor = BoxExecutor(Boxes(provider, kept, owner))
    slots = [Slot(number, None, Path()) for number in range(num_slots)]
    try:
        await executor.boxes.open()
        log.info("programs run in a provider's boxes", extra={"provider": provider.kind, "image": settings.image})
        yield Opened(executor, slots, dict(LANGUAGES), "python3", {})
    finally:
        await executor.close()
