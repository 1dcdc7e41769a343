"""All that a gateway opens at start-up, in order, and closes in reverse."""

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, fields

from flotilla.services.gateway import signals
from flotilla.services.gateway.access.tokens import Tokens
from flotilla.services.gateway.datasets.held_out import HeldOutRows
from flotilla.services.gateway.episodes.episodes import Episodes
from flotilla.services.gateway.episodes.rollouts import Rollouts
from flotilla.services.gateway.events.log import EventLog
from flotilla.services.gateway.feeder.status import FeederStatus
from flotilla.services.gateway.lifecycle.commands import ExperimentCommands
from flotilla.services.gateway.membership.fleet import Fleet
from flotilla.services.gateway.monitoring.health.keeping import restore_windows
from flotilla.services.gateway.monitoring.idle_ratios import IdleRatios
from flotilla.services.gateway.publications.publications import Publications
from flotilla.services.gateway.records.per_experiment import PerExperiment
from flotilla.services.gateway.records.repository import ExperimentRepository, OpenPlane
from flotilla.services.gateway.registry.services import Registry
from flotilla.services.gateway.runtime.parts import GatewayParts
from flotilla.services.gateway.runtime.reconciler import Reconciler
from flotilla.services.gateway.runtime.work import ExperimentWork
from flotilla.services.gateway.samples.indexing import SampleIndexes
from flotilla.services.gateway.scheduler.quota import Scheduler
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.services.gateway.store.base import Store
from flotilla.services.gateway.store.sql import SqlStore
from flotilla.shared.clock import Clock, SystemClock
from flotilla.shared.errors import FlotillaError, Unavailable
from flotilla.shared.schemas.service import ServiceKind
from flotilla.shared.schemas.task import Lane
from flotilla.shared.streams.plane import DataPlane
from flotilla.shared.streams.redis.connection import check_server, connect
from flotilla.shared.streams.redis.plane import RedisDataPlane
from flotilla.shared.streams.settings import StreamsConfig

log = logging.getLogger(__name__)

DATA_PLANE_SECONDS = 5.0
CLEANING_SECONDS = 3600.0
READY_SECONDS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayState(GatewayParts):
    """What the routes work with.

    Attributes:
        ping_streams: proves that the data plane's server answers, or raises ``Unavailable``.
    """

    scheduler: Scheduler
    episodes: Episodes
    reconciler: Reconciler
    ping_streams: Callable[[], Awaitable[None]]

    async def why_not_ready(self) -> str | None:
        """Name what does not answer; None if everything does."""
        try:
            async with asyncio.timeout(READY_SECONDS):
                await self.store.ping()
                await self.ping_streams()
        except FlotillaError as error:
            return error.detail
        except TimeoutError:
            return f"the database or the data plane did not answer within {READY_SECONDS:g} s"
        return None


OpenState = Callable[[GatewaySettings], AbstractAsyncContextManager[GatewayState]]


@asynccontextmanager
async def open_state(settings: GatewaySettings) -> AsyncIterator[GatewayState]:
    """Open the database and the data plane, load what an earlier process left, and run.

    Raises:
        Unavailable: the database or the Redis server does not answer.
    """
    await asyncio.to_thread(settings.experiments.mkdir, parents=True, exist_ok=True)
    server = await check_server(settings.redis_url, may_be_volatile=settings.allow_volatile_redis)
    log.info("data plane answers", extra={"server": server})
    redis = connect(settings.redis_url)

    def open_plane(experiment_id: str, lane: Lane, *, lease_seconds: float | None = None) -> DataPlane:
        config = StreamsConfig(deadline_seconds=DATA_PLANE_SECONDS)
        if lease_seconds is not None:
            config = config.model_copy(update={"lease_seconds": lease_seconds})
        return RedisDataPlane(redis, experiment_id, lane, config)

    async def ping_streams() -> None:
        try:
            await redis.ping()
        except Exception as error:
            raise Unavailable(f"the Redis server does not answer: {error}") from error

    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(redis.aclose)
        store = await SqlStore.open(settings.resolved_database_url)
        stack.push_async_callback(store.close)
        yield await stack.enter_async_context(running_state(settings, store, open_plane, ping_streams, SystemClock()))


@asynccontextmanager
async def running_state(
    settings: GatewaySettings,
    store: Store,
    open_plane: OpenPlane,
    ping_streams: Callable[[], Awaitable[None]],
    clock: Clock,
) -> AsyncIterator[GatewayState]:
    """Put the parts together, load what the store remembers, and run the reconciler while the context lasts."""
    state = assemble(settings, store, open_plane, ping_streams, clock)
    await state.repository.load()
    await state.commands.load()
    await state.registry.load()
    await state.tokens.load()
    await state.publications.load()
    await restore_windows(state.repository, state.measurements, state.store)
    tasks = [
        asyncio.create_task(state.reconciler.run(), name="reconciler"),
        asyncio.create_task(_clean(state), name="cleaning"),
    ]
    try:
        yield state
    finally:
        await signals.end(*tasks)
        await state.episodes.rollouts.aclose()
        state.samples.reads.close()


def assemble(
    settings: GatewaySettings,
    store: Store,
    open_plane: OpenPlane,
    ping_streams: Callable[[], Awaitable[None]],
    clock: Clock,
) -> GatewayState:
    """Make the parts and connect them; nothing runs yet."""
    registry = _registry(settings, store, clock)
    tokens = Tokens(store, clock, settings.token, settings.service_token, settings.quota)
    repository = ExperimentRepository(store, clock, open_plane, tokens.quota_of)
    events = EventLog(store, clock)
    publications = Publications(store, clock, registry, repository, events, phase_seconds=settings.publication_seconds)
    commands = ExperimentCommands(
        repository,
        registry,
        publications,
        events,
        clock,
        settings.experiments,
        settings.places,
        on_restart=lambda each: fleet.measurements.of(each).health.clear(),
    )
    wake = asyncio.Event()
    idle_ratios = IdleRatios(store, clock)
    fleet = Fleet(
        registry, repository, publications, commands, events, clock, store, idle_ratios, tokens, on_change=wake.set
    )

    parts = GatewayParts(
        settings=settings,
        store=store,
        clock=clock,
        registry=registry,
        repository=repository,
        publications=publications,
        commands=commands,
        fleet=fleet,
        events=events,
        tokens=tokens,
        feeder_status=PerExperiment(FeederStatus),
        measurements=fleet.measurements,
        samples=SampleIndexes(),
        held_out=PerExperiment(HeldOutRows),
    )
    work = ExperimentWork(parts)
    patience = {"unfair_seconds": settings.unfair_seconds, "notice_seconds": settings.notice_seconds}
    scheduler = Scheduler(registry, repository, fleet, events, clock, **patience)
    reconciler = Reconciler(parts, scheduler, wake, work=work.run, end=work.end)

    def on_change(experiment_id: str) -> None:
        fleet.wake(experiment_id)
        wake.set()

    repository.on_change = on_change
    given = {field.name: getattr(parts, field.name) for field in fields(GatewayParts)}
    episodes = _episodes(parts)
    return GatewayState(
        **given, scheduler=scheduler, episodes=episodes, reconciler=reconciler, ping_streams=ping_streams
    )


def _episodes(parts: GatewayParts) -> Episodes:
    rollouts = Rollouts(parts.registry, functools.partial(parts.tokens.peer_of, ServiceKind.ROLLOUT))
    return Episodes(parts.repository, rollouts, parts.tokens, parts.clock, parts.measurements)


async def _clean(state: GatewayState) -> None:
    """Forget old answers to idempotency keys and expired tokens, now and every hour."""
    while True:
        try:
            await state.store.delete_answers(state.clock.now() - state.settings.answer_seconds)
            await state.tokens.delete_expired()
        except FlotillaError as error:
            log.warning("old answers and tokens could not be deleted", extra={"error": repr(error)})
        await asyncio.sleep(CLEANING_SECONDS)


def _registry(settings: GatewaySettings, store: Store, clock: Clock) -> Registry:
    return Registry(
        store,
        clock,
        lease_seconds=settings.lease_seconds,
        grace_seconds=settings.grace_seconds,
        rest_seconds=settings.rest_seconds,
    )
