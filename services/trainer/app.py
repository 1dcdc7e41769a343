"""The trainer service as an app: health, metrics, and the weights of the versions it published last."""

from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Protocol

from fastapi import FastAPI

from services.trainer.state import TrainerState, open_state
from services.trainer.supervisor.served_images import ServedImages
from shared.service_app import create_service_app
from shared.settings import ServiceSettings
from shared.weights.pull import PublishedImages, weights_router


class OpenTrainerState(Protocol):
    """Opens what the service needs."""

    def __call__(
        self, settings: ServiceSettings, address: str, images: ServedImages
    ) -> AbstractAsyncContextManager[TrainerState]:
        """Open it for as long as the block runs."""


def create_app(settings: ServiceSettings, address: str, *, open_state: OpenTrainerState = open_state) -> FastAPI:
    """Make the app of a trainer service that is reached at ``address``."""
    published = PublishedImages()
    app = create_service_app("Flotilla trainer", partial(open_state, settings, address, ServedImages(published)))
    app.include_router(weights_router(published, settings.token))
    return app
