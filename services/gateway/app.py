"""The gateway's HTTP interface. ``create_app`` opens nothing; its lifespan does."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Scope

from flotilla.services.gateway.description import describe_gateway
from flotilla.services.gateway.middleware import Guard, Opened
from flotilla.services.gateway.page.reference import add_pages
from flotilla.services.gateway.routes import (
    experiments,
    fleet,
    health,
    publications,
    series,
    services,
    takeovers,
    tokens,
    webhooks,
)
from flotilla.services.gateway.routes.doors import add_doors, doors_opened
from flotilla.services.gateway.routes.follower_calls import answering_callers
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.services.gateway.state import GatewayState, OpenState, open_state
from flotilla.shared.net.server.request_body import Bodies
from flotilla.shared.net.server.serving import add_problem_handlers

DESCRIPTION = "Control plane of a fleet that post-trains language models by asynchronous reinforcement learning."


def create_app(settings: GatewaySettings, *, open_state: OpenState = open_state) -> FastAPI:
    """Make the app; ``open_state`` is entered when it starts and left when it ends."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
        async with open_state(settings) as state, doors_opened(settings, state.store) as doors:
            app.state.gateway = state
            yield {"gateway": state, **doors}

    app = _GatewayApp(
        settings,
        title="Flotilla gateway",
        description=DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        # The framework would look for exporters in each request: a fourteenth of a status call.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    add_problem_handlers(app)
    app.include_router(health.router)
    # Services first: routes are tried in order, and theirs are asked for most often by far.
    shared = (services, experiments, fleet, publications, takeovers, tokens, webhooks)
    for router in (*(module.router for module in shared), *series.ROUTERS):
        app.include_router(router, prefix="/v1")
    add_doors(app, settings)
    describe_gateway(app)
    add_pages(app)
    _prepare(app)
    return app


def _prepare(app: FastAPI) -> None:
    """Let the framework read every route's signature now: it would in the first request, and hold the loop for that."""
    nowhere = {"type": "http", "method": "GET", "path": "/", "root_path": "", "headers": []}
    for route in app.routes:
        route.matches(nowhere)


class _GatewayApp(FastAPI):
    """Lets each request pass the guard, and answers what is asked most, before the framework sees it."""

    def __init__(self, settings: GatewaySettings, **options: Any) -> None:
        super().__init__(**options)
        self._bodies = Bodies(settings.held_body_bytes)

    def build_middleware_stack(self) -> ASGIApp:
        """Put the framework's own layers inside: a waiting status call would keep a frame of each."""
        framework = super().build_middleware_stack()
        return Guard(answering_callers(framework), opened_of=_opened_of, bodies=self._bodies)


def _opened_of(scope: Scope) -> Opened:
    state: GatewayState = scope["state"]["gateway"]
    return Opened(state.store, state.clock, state.tokens, state.owner_of)
