"""Interfaces that clients know already: of agents, as OpenAI's speak, and of the Tinker client."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from flotilla.services.gateway.routes import agents, tinker
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.services.gateway.store.base import Store
from flotilla.services.gateway.tinker.opening import opened


def add_doors(app: FastAPI, settings: GatewaySettings) -> None:
    """Add their routes; the Tinker API's where there is a model for it."""
    app.include_router(agents.router, prefix="/v1")
    if settings.tinker_model is not None:
        app.include_router(tinker.router, prefix="/api/v1")


@asynccontextmanager
async def doors_opened(settings: GatewaySettings, store: Store) -> AsyncIterator[dict[str, Any]]:
    """Open what their routes find in a request's state, while the block runs."""
    async with opened(settings, store) as served:
        yield {"tinker": served}
