"""Durable checkpoints of an experiment."""

from fastapi import APIRouter

from services.gateway.routes.dependencies import Cursor, Gateway, Limit, page_of
from shared.schemas.experiment import CheckpointView, Page

router = APIRouter(prefix="/experiments/{experiment_id}", tags=["series"])


@router.post("/checkpoints", status_code=201)
async def put_checkpoint(experiment_id: str, checkpoint: CheckpointView, gateway: Gateway) -> CheckpointView:
    """Record a durable checkpoint.

    Raises:
        NotFound: there is no such experiment (404).
    """
    experiment = gateway.repository.get(experiment_id)
    await gateway.store.put_checkpoint(experiment_id, checkpoint)
    if checkpoint.step > experiment.record.step:
        # A trainer that is stopped at once may not say itself how far it came.
        await gateway.repository.update(experiment, step=checkpoint.step)
    await gateway.events.append(
        experiment_id, "checkpoint", step=checkpoint.step, version=checkpoint.version, path=checkpoint.path
    )
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
