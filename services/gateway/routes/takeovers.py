"""Takeovers: how a trainer learns what is true when it begins or comes back."""

from fastapi import APIRouter

from flotilla.services.gateway.publications.takeovers import Takeovers
from flotilla.services.gateway.routes.dependencies import Gateway, Trainer
from flotilla.shared.checkpoints.takeover import RefusedIncarnation, TakeoverAnswer, TakeoverRequest

router = APIRouter(prefix="/experiments/{experiment_id}/takeovers", tags=["publications"])


@router.post("")
async def take_over(experiment_id: str, request: TakeoverRequest, trainer: Trainer, gateway: Gateway) -> TakeoverAnswer:
    """Decide what a trainer continues with: which versions its lineage has, and which are lost.

    Raises:
        Conflict: the experiment is not active, or has no trainer.
        NotAssigned: the caller is not its trainer, or was it in an earlier epoch.
        Unavailable: the gateway has just started and has not heard from every rollout; try again.
    """
    return await _takeovers(gateway).decide(experiment_id, trainer, request)


@router.post("/refused", status_code=204)
async def refused(experiment_id: str, refusal: RefusedIncarnation, trainer: Trainer, gateway: Gateway) -> None:
    """Appoint a trainer again that the data plane takes for an earlier one: the database came back older.

    Raises:
        Conflict: the experiment is not active, or has no trainer.
        NotAssigned: the caller is not its trainer, or was it in an earlier epoch.
    """
    await _takeovers(gateway).raise_epoch(experiment_id, trainer, refusal)


def _takeovers(gateway: Gateway) -> Takeovers:
    restore = gateway.commands.live.stage_restored
    return Takeovers(gateway.repository, gateway.registry, gateway.store, gateway.events, restore)
