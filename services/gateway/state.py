"""All that a gateway opens at start-up, in order, and closes in reverse."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Final

from flotilla.services.gateway import signals
from flotilla.services.gateway.checks.inquiries import Inquiries
from flotilla.services.gateway.episodes.episodes import Episodes
from flotilla.services.gateway.monitoring.health.measurements import restore_windows
from flotilla.services.gateway.records.repository import OpenPlane
from flotilla.services.gateway.runtime.cleaning import Cleaning
from flotilla.services.gateway.runtime.data_plane import open_data_plane, why_no_answer
from flotilla.services.gateway.runtime.parts import GatewayParts
from flotilla.services.gateway.runtime.reconciler import Reconciler
from flotilla.services.gateway.runtime.work import ExperimentWork
from flotilla.services.gateway.scheduler.quota import Scheduler
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.services.gateway.store.base import Store
from flotilla.services.gateway.store.sql import SqlStore
from flotilla.shared.clock import Clock, SystemClock


class GatewayState(GatewayParts):
    """What the routes work with: the parts, and what works on them once it is run.

    Args:
        ping_streams: proves that the data plane's server answers, or raises ``Unavailable``.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        store: Store,
        open_plane: OpenPlane,
        ping_streams: Callable[[], Awaitable[None]],
        clock: Clock,
    ) -> None:
        super().__init__(settings, store, open_plane, clock)
        self._ping_streams = ping_streams
        inquiries = Inquiries(self.registry, self.fleet.returning, self.tokens.for_logs, settings.data, clock)
        self.logs: Final = inquiries.logs
        self.examinations: Final = inquiries.examinations
        self.episodes: Final = Episodes(self.repository, self.registry, self.tokens, clock, self.measurements)
        self.scheduler: Final = Scheduler(
            self.registry,
            self.repository,
            self.fleet,
            self.events,
            clock,
            lambda experiment: self.measurements.of(experiment).lending.verdict.reason,
            unfair_seconds=settings.unfair_seconds,
            notice_seconds=settings.notice_seconds,
        )
        self.cleaning: Final = Cleaning(self)
        work = ExperimentWork(self)
        self.reconciler: Final = Reconciler(self, self.scheduler, work=work.run, end=work.end)

    async def load(self) -> None:
        """Load what the store remembers of an earlier process."""
        await self.events.webhooks.load()
        await self.repository.load()
        await self.commands.load()
        await self.registry.load()
        await self.fleet.returning.load()
        await self.tokens.load()
        await self.publications.load()
        await restore_windows(self.repository, self.measurements, self.store)

    async def why_not_ready(self) -> str | None:
        """Name what does not answer; None if everything does."""
        return await why_no_answer(self.store.ping, self._ping_streams)


OpenState = Callable[[GatewaySettings], AbstractAsyncContextManager[GatewayState]]


@asynccontextmanager
async def open_state(settings: GatewaySettings) -> AsyncIterator[GatewayState]:
    """Open the data plane and the database, load what an earlier process left, and run.

    Raises:
        Unavailable: the database or the Redis server does not answer.
    """
    await asyncio.to_thread(settings.experiments.mkdir, parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        # First: only the gateway that holds the lock may touch the data plane.
        store = await SqlStore.open(settings.resolved_database_url, settings.address, settings.on_deposed)
        stack.push_async_callback(store.close)
        if store.has_standbys:
            beating = asyncio.create_task(store.beat(), name="beat")
            stack.push_async_callback(signals.end, beating)
        planes = await stack.enter_async_context(open_data_plane(settings, store.confirm))
        state = GatewayState(settings, store, planes.open, planes.ping, SystemClock())
        yield await stack.enter_async_context(running(state))


@asynccontextmanager
async def running(state: GatewayState) -> AsyncIterator[GatewayState]:
    """Load what the store remembers, and run the reconciler while the context lasts."""
    await state.load()
    tasks = [
        asyncio.create_task(state.reconciler.run(), name="reconciler"),
        asyncio.create_task(state.cleaning.run(), name="cleaning"),
        asyncio.create_task(state.events.webhooks.run(), name="web hooks"),
    ]
    try:
        yield state
    finally:
        await signals.end(*tasks)
        await state.logs.aclose()
        await state.episodes.rollouts.aclose()
        state.samples.close()
