"""Durable checkpoints of an experiment, and their files."""

import asyncio
import os
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse
from starlette.types import Receive, Scope, Send

from flotilla.services.gateway.records.repository import Experiment
from flotilla.services.gateway.routes.dependencies import OF_TRAINER, Cursor, Gateway, Jobs, Limit, page_of
from flotilla.services.gateway.store.answers import stage_answer
from flotilla.services.gateway.store.writes import PutCheckpoint
from flotilla.services.gateway.uploads.uploads import compare, record_of
from flotilla.shared.checkpoints.folders import CHECKPOINTS, StoredCheckpoint, state_of
from flotilla.shared.errors import InvalidRequest, NotFound
from flotilla.shared.files.beneath import same_file
from flotilla.shared.schemas.experiment import (
    CheckpointFile,
    CheckpointFiles,
    CheckpointView,
    ListedCheckpoint,
    Page,
    UploadCheck,
)

router = APIRouter(prefix="/experiments/{experiment_id}", tags=["series"])

LONGEST_SHOWN = 200


@router.post("/checkpoints", status_code=201, dependencies=[OF_TRAINER])
async def put_checkpoint(experiment_id: str, checkpoint: CheckpointView, gateway: Gateway) -> CheckpointView:
    """Record a durable checkpoint.

    Raises:
        NotFound: there is no such experiment.
        NotAssigned: the caller is not its trainer, or was it in an earlier epoch.
        InvalidRequest: its path is not that of the step's checkpoint in the experiment's directory.
    """
    experiment = gateway.repository.get(experiment_id)
    expected = str(_path_of(experiment, checkpoint.step))
    if checkpoint.path != expected:
        entry = {"path": "path", "value": checkpoint.path[:LONGEST_SHOWN], "allowed": expected}
        raise InvalidRequest(f"path: the checkpoint of step {checkpoint.step} is at {expected}", errors=[entry])
    async with gateway.store.transaction() as change:
        change.write(PutCheckpoint(experiment_id, checkpoint))
        # A trainer that is stopped at once may not say itself how far it came.
        gateway.repository.stage_step(change, experiment, checkpoint.step)
        facts = checkpoint.model_dump(include={"step", "version", "path"})
        gateway.events.stage(change, experiment_id, "checkpoint", **facts)
        stage_answer(change, checkpoint)
    return checkpoint


@router.get("/checkpoints")
async def checkpoints(
    experiment_id: str, gateway: Gateway, jobs: Jobs, after: Cursor = None, limit: Limit = 100
) -> Page[ListedCheckpoint]:
    """List the checkpoints by step, with how far their copies at ``checkpoint.upload_to`` are.

    Of an experiment of the kind tinker what was saved of it, oldest first, each with the path that the Tinker API has.

    Raises:
        NotFound: there is no such experiment.
    """
    if jobs.is_one(experiment_id):
        saved = await jobs.checkpoints(experiment_id)
        return page_of([(str(number), each) for number, each in enumerate(saved)], after, limit)
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
        NotFound: there is no such experiment or checkpoint, it is not on the gateway's disk, or no URL is named.
        InvalidSpec: the operator does not allow the URL any more.
        Unavailable: the store does not answer, or refuses.
    """
    stored = await _stored(experiment_id, step, gateway)
    return await compare(gateway.repository.get(experiment_id), stored, gateway.settings.places)


@router.get("/checkpoints/{step}/files")
async def files(experiment_id: str, step: int, gateway: Gateway) -> CheckpointFiles:
    """List the files of a checkpoint; those below ``model/`` are an ordinary Hugging Face directory.

    Raises:
        NotFound: there is no such experiment or checkpoint, or it is not on the gateway's disk.
    """
    stored = await _stored(experiment_id, step, gateway)
    return CheckpointFiles(
        step=step,
        path=str(stored.path),
        files=tuple(
            CheckpointFile(name=name, size_bytes=size, checksum=stored.state.checksums.get(name, ""))
            for name, size in sorted(stored.state.files.items())
        ),
    )


@router.get("/checkpoints/{step}/files/{name:path}", response_class=FileResponse)
async def file(experiment_id: str, step: int, name: str, gateway: Gateway) -> FileResponse:
    """Send one of them; a ``Range`` is honoured, so a download can continue where it broke off.

    Raises:
        NotFound: there is no such experiment, checkpoint or file.
    """
    stored = await _stored(experiment_id, step, gateway)
    if name not in stored.state.files:
        # Nothing but what the checkpoint says that it consists of is ever opened.
        raise NotFound(f"checkpoint {step} of {experiment_id} has no file {name!r}", experiment_id=experiment_id)
    try:
        return OpenedFile(await asyncio.to_thread(_descriptor_of, stored, name))
    except OSError as error:
        raise NotFound(f"{name} of checkpoint {step} cannot be read: {error.strerror}", path=name) from None


class OpenedFile(FileResponse):
    """Sends a file that was opened when its name was checked: nothing that is done to the name since matters.

    Args:
        descriptor: of the file; closed when it was sent.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(same_file(descriptor), media_type="application/octet-stream", stat_result=os.fstat(descriptor))
        self._descriptor = descriptor

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            os.close(self._descriptor)


def _descriptor_of(stored: StoredCheckpoint, name: str) -> int:
    with stored.open(name) as file:
        return os.dup(file.fileno())


def _path_of(experiment: Experiment, step: int) -> Path:
    return Path(experiment.record.directory) / CHECKPOINTS / f"step-{step:08d}"


async def _stored(experiment_id: str, step: int, gateway: Gateway) -> StoredCheckpoint:
    experiment = gateway.repository.get(experiment_id)
    found = next((each for each in await gateway.store.checkpoints(experiment_id) if each.step == step), None)
    if found is None:
        raise NotFound(f"{experiment_id} has no checkpoint of step {step}", experiment_id=experiment_id)
    path, below = _path_of(experiment, step), Path(experiment.record.directory).parent
    state = await asyncio.to_thread(state_of, path, below)
    if state is None:
        raise NotFound(
            f"the checkpoint of step {step} is not at {path} on the gateway's machine: it was removed "
            "(checkpoint.keep), a link leads to it or to a file of it, or the trainer's directory is not shared with "
            "the gateway",
            experiment_id=experiment_id,
        )
    return StoredCheckpoint(step, path, state, below)
