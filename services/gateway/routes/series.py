"""The routes about one experiment, in the order in which they are tried."""

from typing import Final

from fastapi import APIRouter

from flotilla.services.gateway.routes import checkpoints, events, facts, gradings, metrics, profiles, samples

ROUTERS: Final[tuple[APIRouter, ...]] = tuple(
    module.router for module in (gradings, facts, metrics, events, checkpoints, samples, profiles)
)
