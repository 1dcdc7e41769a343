"""Held-out rows with finished answers."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query

from flotilla.services.gateway.routes.dependencies import MAX_WHOLE, OF_TRAINER, Gateway
from flotilla.shared.schemas.held_out import HeldOutPage

router = APIRouter(prefix="/experiments/{experiment_id}", tags=["series"])


@router.get("/held_out_rows", dependencies=[OF_TRAINER])
async def held_out_rows(
    experiment_id: str,
    gateway: Gateway,
    first: Annotated[int, Query(ge=0, le=MAX_WHOLE, description="number of a row")] = 0,
) -> HeldOutPage:
    """Return rows of ``job.held_out`` as tokens; the trainer computes their loss.

    Raises:
        NotFound: there is no such experiment, or no such row.
        NotAssigned: the caller is a service, and not the experiment's trainer now.
        Unavailable: the experiment's datasets are not loaded; try again.
    """
    rows = gateway.held_out.of(gateway.repository.get(experiment_id))
    return await asyncio.to_thread(rows.page, first)
