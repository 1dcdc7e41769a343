"""The rollout service as an app."""

from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Protocol

from fastapi import FastAPI

from services.rollout.state import RolloutState, open_state
from shared.service_app import create_service_app
from shared.settings import ServiceSettings


class OpenRolloutState(Protocol):
    """Opens what the service needs."""

    def __call__(self, settings: ServiceSettings, address: str) -> AbstractAsyncContextManager[RolloutState]:
        """Open it for as long as the block runs."""


def create_app(settings: ServiceSettings, address: str, *, open_state: OpenRolloutState = open_state) -> FastAPI:
    """Make the app of a rollout service that is reached at ``address``."""
    return create_service_app("Flotilla rollout", partial(open_state, settings, address))
