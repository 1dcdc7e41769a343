"""The reward service as an app."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial

from fastapi import FastAPI

from flotilla.services.reward.state import RewardState, open_state
from flotilla.shared.environment.settings import ServiceSettings
from flotilla.shared.service.app import create_service_app


def create_app(
    settings: ServiceSettings,
    address: str,
    *,
    open_state: Callable[..., AbstractAsyncContextManager[RewardState]] = open_state,
) -> FastAPI:
    """Make the app of a reward service that is reached at ``address``."""
    return create_service_app("Flotilla reward", "flotilla.services.reward", partial(open_state, settings, address))
