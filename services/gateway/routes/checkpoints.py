"""Durable checkpoints of an experiment, and their files."""

import asyncio
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse

from services.gateway.routes.dependencies import OF_TRAINER, Cursor, Gateway, Limit, page_of
from services.gateway.store.answers import stage_answer
from services.gateway.store.writes import PutCheckpoint
from services.gateway.uploads.uploads import compare, record_of
from shared.checkpoints import CheckpointState, StoredCheckpoint, state_of
from shared.errors import NotFound
from shared.schemas.experiment import CheckpointFile, CheckpointFiles, CheckpointView, Page
from shared.schemas.uploads import ListedCheckpoint, UploadCheck

router = APIRouter(prefix="/experiments/{experiment_id}", tags=["series"])


@router.post("/checkpoints", status_code=201, dependencies=[OF_TRAINER])
async def put_checkpoint(experiment_id: str, checkpoint: CheckpointView, gateway: Gateway) -> CheckpointView:
    """Record a durable checkpoint.

    Raises:
        NotFound: there is no such experiment (404).
        NotAssigned: the caller is not its trainer, or was it in an earlier epoch (409).
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
    """List the checkpoints by step, with how far their copies at ``checkpoint.upload_to`` are.

    Raises:
        NotFound: there is no such experiment (404).
    """
    experiment = gateway.repository.get(experiment_id)
    found = await gateway.store.checkpoints(experiment_id)
    uploads = await record_of(gateway.store, experiment)
    listed = [
        ListedCheckpoint(**each.model_dump(), upload=None if uploads is None else uploads.view_of(each.step))
        for each in found
    ]
    return page_of([(str(each.step), each) for each in listed], after, limit)


@router.get("/checkpoints/{step}/upload")
async def check_upload(experiment_id: str, step: int, gateway: Gateway) -> UploadCheck:
    """Compare a checkpoint with its copy at ``checkpoint.upload_to`` as it is now: its state, and every file's size.

    Raises:
        NotFound: there is no such experiment or checkpoint, it is not on the gateway's disk, or no URL is named (404).
        InvalidSpec: the operator does not allow the URL any more (422).
        Unavailable: the store does not answer, or refuses (503).
    """
    path, state = await _stored(experiment_id, step, gateway)
    stored = StoredCheckpoint(step, path, state)
    return await compare(gateway.repository.get(experiment_id), stored, gateway.settings.places)


@router.get("/checkpoints/{step}/files")
async def files(experiment_id: str, step: int, gateway: Gateway) -> CheckpointFiles:
    """List the files of a checkpoint; those below ``model/`` are an ordinary Hugging Face directory.

    Raises:
        NotFound: there is no such experiment or checkpoint, or it is not on the gateway's disk (404).
    """
    path, state = await _stored(experiment_id, step, gateway)
    return CheckpointFiles(
        step=step,
        path=str(path),
        files=tuple(
            CheckpointFile(name=name, size_bytes=size, checksum=state.checksums.get(name, ""))
            for name, size in sorted(state.files.items())
        ),
    )


@router.get("/checkpoints/{step}/files/{name:path}", response_class=FileResponse)
async def file(experiment_id: str, step: int, name: str, gateway: Gateway) -> FileResponse:
    """Send one of them; a ``Range`` is honoured, so a download can go on where it broke off.

    Raises:
        NotFound: there is no such experiment, checkpoint or file (404).
    """
    path, state = await _stored(experiment_id, step, gateway)
    if name not in state.files:
        # Nothing but what the checkpoint says that it consists of is ever opened.
        raise NotFound(f"checkpoint {step} of {experiment_id} has no file {name!r}", experiment_id=experiment_id)
    return FileResponse(path / name, media_type="application/octet-stream")


async def _stored(experiment_id: str, step: int, gateway: Gateway) -> tuple[Path, CheckpointState]:
    gateway.repository.get(experiment_id)
    found = next((each for each in await gateway.store.checkpoints(experiment_id) if each.step == step), None)
    if found is None:
        raise NotFound(f"{experiment_id} has no checkpoint of step {step}", experiment_id=experiment_id)
    path = Path(found.path)
    state = await asyncio.to_thread(state_of, path)
    if state is None:
        raise NotFound(
            f"the checkpoint of step {step} is not at {path} on the gateway's machine: it was removed "
            "(checkpoint.keep), or the trainer's directory is not shared with the gateway",
            experiment_id=experiment_id,
        )
    return path, state
