"""Lets go of what belongs to sessions that ended: models, sampling sessions, snapshots, states, requests.

What was saved under a name stays, and so does what the model was, to be listed with it.
"""

import asyncio
import logging

from flotilla.services.gateway.tinker.saved import SavedModels
from flotilla.services.gateway.tinker.tinker import SESSION_SECONDS
from flotilla.shared.clock import Clock
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
        """Let go of those that are over; one whose requests are still done waits. Returns how many there were."""
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
