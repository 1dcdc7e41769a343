"""The trainer service as an app: health, metrics, and the weights of the versions it published last."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial

from fastapi import FastAPI

from flotilla.services.trainer.hosting.hosts import SharedWorkers
from flotilla.services.trainer.state import TrainerState, open_state
from flotilla.services.trainer.supervisor.served_images import ServedImages
from flotilla.shared.environment.settings import ServiceSettings
from flotilla.shared.net.authorisation.tokens import Credentials
from flotilla.shared.service.app import create_service_app
from flotilla.shared.service.logs import logs_router
from flotilla.shared.weights.pull.server import PublishedImages, weights_router


def create_app(
    settings: ServiceSettings,
    address: str,
    *,
    open_state: Callable[..., AbstractAsyncContextManager[TrainerState]] = open_state,
    credentials: Credentials | None = None,
    workers: SharedWorkers | None = None,
) -> FastAPI:
    """Make the app of a trainer service that is reached at ``address``.

    Args:
        settings, address: of the service.
        open_state: opens what it works with.
        credentials: accepted tokens for pulling weights.
        workers: of several services of this process; None: each starts its own.
    """
    published = PublishedImages()
    credentials = credentials or Credentials(settings.token)
    opening = partial(open_state, settings, address, ServedImages(published), credentials)
    if workers is not None and settings.experiments > 1:
        opening = partial(opening, start_worker=workers.start)
    app = create_service_app("Flotilla trainer", "flotilla.services.trainer", opening)
    app.include_router(weights_router(published, credentials))
    app.include_router(logs_router(credentials.accepts_for_logs))
    return app
