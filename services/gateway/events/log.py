"""Events of the experiments: stored first, then sent to followers."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final

from flotilla.services.gateway.events.webhooks import Webhooks
from flotilla.services.gateway.store.base import Store
from flotilla.services.gateway.store.transaction import Transaction
from flotilla.services.gateway.store.writes import AppendEvent
from flotilla.shared.clock import Clock
from flotilla.shared.environment.settings import IPNetwork
from flotilla.shared.environment.webhooks import Webhook
from flotilla.shared.schemas.experiment import Event

log = logging.getLogger(__name__)

PAGE = 200


class EventLog:
    """Appends events, wakes the followers of their experiment, and leaves them to web hooks.

    Args:
        store: where they are kept.
        clock: the time.
        hooks: web hooks that receive them.
        networks: that are not public and that hooks may be in.
    """

    def __init__(
        self, store: Store, clock: Clock, hooks: Sequence[Webhook] = (), networks: Sequence[IPNetwork] = ()
    ) -> None:
        self._store = store
        self._clock = clock
        self.webhooks: Final = Webhooks(hooks, networks, store, clock)
        self._followers: dict[str, set[asyncio.Event]] = {}

    async def append(self, experiment_id: str, kind: str, **data: Any) -> None:
        """Store an event and wake the followers."""
        async with self._store.transaction() as change:
            self.stage(change, experiment_id, kind, **data)

    def stage(self, change: Transaction, experiment_id: str, kind: str, **data: Any) -> None:
        """Store an event with what it reports, and wake the followers once both are stored."""
        facts: Mapping[str, Any] = {name: value for name, value in data.items() if value is not None}

        def follow() -> None:
            extra = {"experiment_id": experiment_id, "event": kind, **{f"event_{k}": v for k, v in facts.items()}}
            log.info("event", extra=extra)
            self.wake(experiment_id)

        at = self._clock.now()
        change.write(AppendEvent(experiment_id, kind, at, facts))
        self.webhooks.stage(change, experiment_id, kind, at, facts)
        change.then(follow)

    def wake(self, experiment_id: str) -> None:
        """Let the followers of an experiment look again."""
        for follower in self._followers.get(experiment_id, ()):
            follower.set()

    async def follow(
        self, experiment_id: str, after: int, *, is_over: Callable[[], bool], heartbeat_seconds: float
    ) -> AsyncIterator[Event | None]:
        """Yield every event after ``after``, and None as a heartbeat when nothing happens.

        Ends when ``is_over`` and everything was yielded.
        """
        appended = asyncio.Event()
        self._followers.setdefault(experiment_id, set()).add(appended)
        try:
            while True:
                appended.clear()
                # Asked before the page is read, so that no event slips in between.
                ends = is_over()
                page = await self._store.events(experiment_id, after=after, limit=PAGE)
                for event in page:
                    yield event
                    after = event.id
                if page:
                    continue
                if ends:
                    return
                try:
                    async with asyncio.timeout(heartbeat_seconds):
                        await appended.wait()
                except TimeoutError:
                    yield None
        finally:
            self._followers[experiment_id].discard(appended)
            if not self._followers[experiment_id]:
                del self._followers[experiment_id]
