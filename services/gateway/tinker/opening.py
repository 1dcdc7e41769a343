"""Opens what the Tinker API's routes work with, and runs what belongs to it."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from flotilla.services.gateway import signals
from flotilla.services.gateway.runtime.fencing import Fence
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.services.gateway.store.base import Store
from flotilla.services.gateway.store.sql import SqlStore
from flotilla.services.gateway.tinker.ended import EndedSessions
from flotilla.services.gateway.tinker.tinker import Tinker
from flotilla.shared.clock import SystemClock
from flotilla.shared.errors import FlotillaError
from flotilla.shared.streams.redis.connection import connect
from flotilla.shared.tinker.queue import TinkerQueue
from flotilla.shared.tinker.sessions import TinkerSessions

log = logging.getLogger(__name__)

CLEANING_SECONDS = 300.0


@asynccontextmanager
async def opened(settings: GatewaySettings, store: Store) -> AsyncIterator[Tinker | None]:
    """Open it while the block runs; None where there is no base model.

    Args:
        settings: which model, and where Redis is.
        store: of the gateway; with standbys, it knows who leads.

    Raises:
        ModelError: the base model's files cannot be read.
    """
    if settings.tinker_model is None:
        yield None
        return
    redis = connect(settings.redis_url)
    if isinstance(store, SqlStore) and store.has_standbys:
        await Fence(redis, store.confirm, "tinker").claim()
    queue, clock = TinkerQueue(redis), SystemClock()
    sessions = TinkerSessions(redis, queue)
    tinker = Tinker(settings.tinker_model, settings.data.resolve(), queue, sessions, clock)
    ended = EndedSessions(sessions, tinker.saved, clock)
    tasks = [
        asyncio.create_task(tinker.futures.run(), name="tinker answers"),
        asyncio.create_task(_clean(tinker, ended), name="tinker cleaning"),
    ]
    try:
        yield tinker
    finally:
        await signals.end(*tasks)
        await redis.aclose()


async def _clean(tinker: Tinker, ended: EndedSessions) -> None:
    """Delete saved models whose time is over, and what belongs to sessions that are, now and every few minutes."""
    while True:
        try:
            await asyncio.to_thread(tinker.saved.delete_expired)
            await ended.let_go()
        except (OSError, FlotillaError) as error:
            log.warning("what is over could not be deleted", extra={"error": repr(error)})
        await asyncio.sleep(CLEANING_SECONDS)
