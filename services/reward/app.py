"""The reward service as an app."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial

from fastapi import FastAPI

from flotilla.services.reward.state import RewardState, open_state
from flotilla.shared.environment.settings import ServiceSettings
from flotilla.shared.net.authorisation.tokens import Credentials
from flotilla.shared.service.app import create_service_app
from flotilla.shared.service.logs import logs_router


def create_app(
    settings: ServiceSettings,
    address: str,
    *,
    open_state: Callable[..., AbstractAsyncContextManager[RewardState]] = open_state,
    credentials: Credentials | None = None,
) -> FastAPI:
    """Make the app of a reward service that is reached at ``address``."""
    credentials = credentials or Credentials(settings.token)
    opening = partial(open_state, settings, address, credentials)
    app = create_service_app("Flotilla reward", "flotilla.services.reward", opening)
    app.include_router(logs_router(credentials.accepts_for_logs))
    return app
