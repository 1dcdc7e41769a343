"""The sandbox's HTTP interface."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import FastAPI

from flotilla.services.sandbox.routes import health, run_code, sessions
from flotilla.services.sandbox.settings import SandboxSettings
from flotilla.services.sandbox.state import SandboxState, open_state
from flotilla.shared.net.authorisation.tokens import Credentials
from flotilla.shared.net.server.description import describe, only_reading_is_open
from flotilla.shared.net.server.gatekeeper import Gatekeeper
from flotilla.shared.net.server.serving import add_problem_handlers
from flotilla.shared.service.logs import logs_router

OpenState = Callable[[SandboxSettings], AbstractAsyncContextManager[SandboxState]]


def create_app(
    settings: SandboxSettings, open_state: OpenState = open_state, credentials: Credentials | None = None
) -> FastAPI:
    """Make the app; its lifespan opens and closes the state.

    Args:
        settings: see ``SandboxSettings``.
        open_state: opens all that the routes need; another one in tests.
        credentials: the accepted tokens; None: the token of the settings.
    """

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[dict[str, SandboxState]]:
        async with open_state(settings) as state:
            yield {"sandbox": state}

    credentials = credentials or Credentials(settings.token.get_secret_value())
    app = FastAPI(title="Flotilla sandbox", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.include_router(health.router)
    app.include_router(run_code.router)
    app.include_router(sessions.router)
    app.include_router(logs_router(credentials.accepts_for_logs))
    add_problem_handlers(app)
    describe(app, "flotilla.services.sandbox", only_reading_is_open)
    app.add_middleware(Gatekeeper, credentials=credentials, max_bytes=settings.max_request_bytes)
    return app
