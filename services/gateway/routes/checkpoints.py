"""Durable checkpoints of an experiment."""

from fastapi import APIRouter

from services.gateway.routes.dependencies import Cursor, Gateway, Limit, page_of
from services.gateway.store.answers import stage_answer
from services.gateway.store.writes import PutCheckpoint
from shared.schemas.experiment import CheckpointView, Page

router = APIRouter(prefix="/experiments/{experiment_id}", tags=["series"])


@router.post("/checkpoints", status_code=201)
async def put_checkpoint(experiment_id: str, checkpoint: CheckpointView, gateway: Gateway) -> CheckpointView:
    """Record a durable checkpoint.

    Raises:
        NotFound: there is no such experiment (404).
    """
    experiment = gateway.repository.get(experiment_id)
    async with gateway.store.transaction() as change:
        change.write(PutCheckpoint(experiment_id, checkpoint))
        # A trainer that is stopped at once may not say itself how far it came.
        gateway.repository.stage_step(change, experiment, checkpoint.step)
        facts = checkpoint.model_dump(include={"step", "version", "path"})
        gateway.events.stage(change, experiment_id, "checkpoint", **facts)
        stage_answer(change, checkpoint)
    return checkpoint


@router.get("/checkpoints")
async def checkpoints(experiment_id: str, gateway: Gateway, after: Cursor = None, limit: Limit = 100) -> Page:
    """List the checkpoints by step.

    Raises:
        NotFound: there is no such experiment (404).
    """
    gateway.repository.get(experiment_id)
    found = await gateway.store.checkpoints(experiment_id)
    return page_of([(str(each.step), each) for each in found], after, limit)
