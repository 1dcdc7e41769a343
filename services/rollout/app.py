"""The rollout service as an app."""

from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Protocol

from fastapi import FastAPI, Request

from services.rollout.agents.episodes import AgentEpisodes
from services.rollout.agents.routes import MAX_BODY_BYTES, episodes_router
from services.rollout.state import RolloutState, open_state
from shared.credentials import Credentials
from shared.gatekeeper import Gatekeeper
from shared.service_app import create_service_app
from shared.settings import ServiceSettings
from shared.weights.pull import PublishedImages, weights_router


class OpenRolloutState(Protocol):
    """Opens what the service needs."""

    def __call__(
        self, settings: ServiceSettings, address: str, credentials: Credentials, published: PublishedImages
    ) -> AbstractAsyncContextManager[RolloutState]:
        """Open it for as long as the block runs."""


def create_app(
    settings: ServiceSettings,
    address: str,
    *,
    open_state: OpenRolloutState = open_state,
    credentials: Credentials | None = None,
) -> FastAPI:
    """Make the app of a rollout service that is reached at ``address``."""
    lets_in = Credentials(settings.token) if credentials is None else credentials
    published = PublishedImages(num_kept=1)
    opening = partial(open_state, settings, address, credentials=lets_in, published=published)
    app = create_service_app("Flotilla rollout", opening)
    app.include_router(weights_router(published, lets_in))
    app.include_router(episodes_router(_agents, lets_in.accepts))
    # Bodies are read before a route is asked: nobody else's are.
    app.add_middleware(Gatekeeper, credentials=lets_in, max_bytes=MAX_BODY_BYTES)
    return app


def _agents(request: Request, experiment_id: str) -> AgentEpisodes | None:
    state: RolloutState = request.state.state
    return state.service.agents(experiment_id)
