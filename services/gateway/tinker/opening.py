"""Opens what the Tinker API's routes work with, and runs what belongs to it."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from flotilla.services.gateway import signals
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.services.gateway.tinker.tinker import Tinker
from flotilla.shared.clock import SystemClock
from flotilla.shared.streams.redis.connection import connect
from flotilla.shared.tinker.queue import TinkerQueue

log = logging.getLogger(__name__)

CLEANING_SECONDS = 3600.0


@asynccontextmanager
async def opened(settings: GatewaySettings) -> AsyncIterator[Tinker | None]:
    """Open it while the block runs; None where there is no base model.

    Raises:
        ModelError: the base model's files cannot be read.
    """
    if settings.tinker_model is None:
        yield None
        return
    redis = connect(settings.redis_url)
    tinker = Tinker(settings.tinker_model, settings.data.resolve(), TinkerQueue(redis), SystemClock())
    tasks = [
        asyncio.create_task(tinker.futures.run(), name="tinker answers"),
        asyncio.create_task(_clean(tinker), name="tinker cleaning"),
    ]
    try:
        yield tinker
    finally:
        await signals.end(*tasks)
        await redis.aclose()


async def _clean(tinker: Tinker) -> None:
    """Delete saved models whose time is over, now and every hour."""
    while True:
        try:
            await asyncio.to_thread(tinker.saved.delete_expired)
        except OSError as error:
            log.warning("saved models could not be deleted", extra={"error": repr(error)})
        await asyncio.sleep(CLEANING_SECONDS)
