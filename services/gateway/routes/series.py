"""The routes about one experiment, in the order in which they are tried."""

from typing import Final

from fastapi import APIRouter

from flotilla.services.gateway.routes import (
    audit,
    checkpoints,
    diagnosis,
    events,
    gradings,
    held_out,
    ledger,
    metrics,
    profiles,
    samples,
    steps,
    usage,
)

ROUTERS: Final[tuple[APIRouter, ...]] = tuple(
    module.router
    for module in (
        gradings,
        ledger,
        metrics,
        events,
        checkpoints,
        diagnosis,
        audit,
        steps,
        samples,
        held_out,
        profiles,
        usage,
    )
)
