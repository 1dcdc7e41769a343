"""The reward service as an app."""

from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Protocol

from fastapi import FastAPI

from flotilla.services.reward.state import RewardState, open_state
from flotilla.shared.environment.settings import ServiceSettings
from flotilla.shared.service.app import create_service_app


class OpenRewardState(Protocol):
    """Opens what the service needs."""

    def __call__(self, settings: ServiceSettings, address: str) -> AbstractAsyncContextManager[RewardState]:
        """Open it for as long as the block runs."""


def create_app(settings: ServiceSettings, address: str, *, open_state: OpenRewardState = open_state) -> FastAPI:
    """Make the app of a reward service that is reached at ``address``."""
    return create_service_app("Flotilla reward", "flotilla.services.reward", partial(open_state, settings, address))
