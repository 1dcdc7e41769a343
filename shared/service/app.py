"""The spine that rollout and reward share: health routes, and a lifespan that opens state and stays a member."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

from fastapi import FastAPI, Request

from flotilla.shared.net.server.description import describe, only_reading_is_open
from flotilla.shared.net.server.serving import add_health_routes, add_problem_handlers, ends_alone
from flotilla.shared.schemas.service import DesiredState, ObservedState
from flotilla.shared.service.membership import Membership

log = logging.getLogger(__name__)

STOP_SECONDS = 15.0


class Following(Protocol):
    """A service that makes what is observed follow what is desired."""

    notify: Callable[[], None]

    def observe(self) -> ObservedState:
        """Return what is going on."""

    async def apply(self, desired: DesiredState) -> None:
        """Note a desired state."""

    async def run(self) -> None:
        """Follow it until cancelled."""


@runtime_checkable
class Leaving(Protocol):
    """A service that needs a moment before its process ends."""

    async def leave(self, notice_seconds: float) -> None:
        """Bring the work in progress to an end within the notice."""


class ServiceState(Protocol):
    """What such a service opens at start-up."""

    @property
    def service(self) -> Following:
        """What works."""

    @property
    def membership(self) -> Membership:
        """What keeps it in the fleet."""


OpenState = Callable[[], AbstractAsyncContextManager[ServiceState]]


@contextlib.asynccontextmanager
async def at_work(service: Following, membership: Membership) -> AsyncIterator[None]:
    """Keep the service following and a member while the block runs; then end its work, then leave the fleet."""
    service.notify = membership.notify
    end_alone = ends_alone()

    def say_why(task: asyncio.Task[None]) -> None:
        _say_why(task)
        if end_alone is not None and not task.cancelled() and task.exception() is None:
            # It has left the fleet: other services of this process continue.
            end_alone()
            return
        # A process that does nothing would look alive: end, so that its owner starts it again.
        signal.raise_signal(signal.SIGTERM)

    member = asyncio.create_task(membership.run(), name="membership")
    work = asyncio.create_task(service.run(), name="service")
    for task in (member, work):
        task.add_done_callback(say_why)
    try:
        yield
    finally:
        for task in (work, member):
            task.remove_done_callback(say_why)
            await _end(task)


def _say_why(task: asyncio.Task[None]) -> None:
    if task.cancelled():
        log.critical("%s was cancelled unexpectedly, and so ends the service", task.get_name())
    elif task.exception() is None:
        log.info("%s is over, and so is the service", task.get_name())
    else:
        log.critical("%s ended, and so does the service", task.get_name(), exc_info=task.exception())


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    waiting: Awaitable[object] = asyncio.wait([task], timeout=STOP_SECONDS)
    await waiting
    if task.done() and not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s failed while it was ended", task.get_name(), exc_info=error)


def create_service_app(title: str, package: str, open_state: OpenState) -> FastAPI:
    """Make the app of the service that a package is; nothing is opened before its lifespan starts."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, ServiceState]]:
        async with open_state() as state:
            app.state.service = state.service
            yield {"state": state}

    app = FastAPI(title=title, lifespan=lifespan, docs_url=None, redoc_url=None)
    add_problem_handlers(app)
    add_health_routes(app, why_not_ready=_why_not_ready, gauges=_gauges)
    describe(app, package, only_reading_is_open)
    return app


async def leave(notice_seconds: float, app: FastAPI) -> None:
    """Let the service of an app leave within a notice, if it has anything to bring to an end."""
    service = getattr(app.state, "service", None)
    if isinstance(service, Leaving):
        await service.leave(notice_seconds)


def _why_not_ready(request: Request) -> str | None:
    state: ServiceState = request.state.state
    if not state.membership.is_connected:
        return "the gateway does not answer"
    failure = state.service.observe().failure
    return f"{failure.component}: {failure.cause}" if failure is not None else None


def _gauges(request: Request) -> dict[str, float]:
    state: ServiceState = request.state.state
    return dict(state.service.observe().load)
