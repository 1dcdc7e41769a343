"""The rollout service as an app."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial

from fastapi import FastAPI, Request

from flotilla.services.rollout.agents.episodes import AgentEpisodes
from flotilla.services.rollout.agents.routes import MAX_BODY_BYTES, episodes_router
from flotilla.services.rollout.engines.shared.pool import SharedEngines
from flotilla.services.rollout.session import SessionOpener
from flotilla.services.rollout.state import RolloutState, open_state
from flotilla.shared.environment.settings import ServiceSettings
from flotilla.shared.net.authorisation.tokens import Credentials
from flotilla.shared.net.server.gatekeeper import Gatekeeper
from flotilla.shared.service.app import create_service_app
from flotilla.shared.service.logs import logs_router
from flotilla.shared.weights.pull.server import PublishedImages, weights_router


def create_app(
    settings: ServiceSettings,
    address: str,
    *,
    open_state: Callable[..., AbstractAsyncContextManager[RolloutState]] = open_state,
    credentials: Credentials | None = None,
    shared: SharedEngines | None = None,
) -> FastAPI:
    """Make the app of a rollout service that is reached at ``address``.

    Args:
        settings, address: of the service.
        open_state: opens what it works with.
        credentials: the accepted tokens.
        shared: engines that several services of this process use; None: each experiment has its own.
    """
    lets_in = Credentials(settings.token) if credentials is None else credentials
    published = PublishedImages(num_kept=1)
    opening = partial(open_state, settings, address, credentials=lets_in, published=published)
    if shared is not None and settings.experiments > 1:
        opening = partial(opening, make_opener=partial(SessionOpener, shared=shared.engine_for))
    app = create_service_app("Flotilla rollout", "flotilla.services.rollout", opening)
    app.include_router(weights_router(published, lets_in))
    app.include_router(logs_router(lets_in.accepts_for_logs))
    app.include_router(episodes_router(_agents, lets_in.accepts))
    # Bodies are read before a route is chosen: only those of authorised callers.
    app.add_middleware(Gatekeeper, credentials=lets_in, max_bytes=MAX_BODY_BYTES)
    return app


def _agents(request: Request, experiment_id: str) -> AgentEpisodes | None:
    state: RolloutState = request.state.state
    return state.service.agents(experiment_id)
