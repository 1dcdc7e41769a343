"""Opens what the Tinker API's routes work with, and runs what belongs to it.

What belongs to sessions that ended is released: models, sampling sessions, snapshots, states, requests.
What was saved under a name stays, and so does what the model was, to be listed with it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from flotilla.services.gateway import signals
from flotilla.services.gateway.runtime.data_plane import Fence
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.services.gateway.store.base import Store
from flotilla.services.gateway.store.sql import SqlStore
from flotilla.services.gateway.tinker.saved import SavedModels
from flotilla.services.gateway.tinker.tinker import SESSION_SECONDS, Tinker
from flotilla.shared.clock import Clock, SystemClock
from flotilla.shared.errors import FlotillaError
from flotilla.shared.streams.redis.connection import connect
from flotilla.shared.tinker.queue import TinkerQueue
from flotilla.shared.tinker.sessions import TinkerSessions

log = logging.getLogger(__name__)


class EndedSessions:
    """Those that were finished, or whose clients are no longer heard of.

    Args:
        sessions: all of them.
        saved: what they saved.
        clock: tells which are over.
    """

    def __init__(self, sessions: TinkerSessions, saved: SavedModels, clock: Clock) -> None:
        self._sessions, self._saved, self._clock = sessions, saved, clock

    async def let_go(self) -> int:
        """Release those that are over; one whose requests are still done waits. Returns how many there were."""
        over = await self._sessions.unseen_since(self._clock.now() - SESSION_SECONDS)
        return sum([await self._let_go(session_id, owner) for session_id, owner in over])

    async def _let_go(self, session_id: str, owner: str) -> bool:
        session = await self._sessions.session(session_id)
        if session is not None and not session.is_finished:
            seen = self._clock.now() - SESSION_SECONDS
            await self._sessions.end(session_id, session, owner, seen)
        models = await self._sessions.close_models(session_id)
        if not all([await self._sessions.is_idle(model_id) for model_id in models]):
            return False
        for model_id in models:
            keeps_record = await asyncio.to_thread(self._saved.forget_run, model_id)
            await self._sessions.forget_model(model_id, keeps_record=keeps_record)
        await self._sessions.forget_session(session_id, owner)
        log.info("session let go", extra={"session_id": session_id, "models": len(models)})
        return True


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
