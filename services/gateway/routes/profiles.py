"""Traces of torch's profiler: what trainer and engine recorded of chosen steps."""

import asyncio
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse

from flotilla.services.gateway.records.repository import Experiment
from flotilla.services.gateway.routes.checkpoints import OpenedFile
from flotilla.services.gateway.routes.dependencies import Cursor, Gateway, Limit, page_of
from flotilla.shared.errors import NotFound
from flotilla.shared.files.beneath import open_beneath, sizes_beneath
from flotilla.shared.schemas.experiment import Page
from flotilla.shared.schemas.wire import Wire
from flotilla.shared.telemetry.profiles import NAME, PROFILES

router = APIRouter(prefix="/experiments/{experiment_id}", tags=["series"])


class ProfileView(Wire):
    """A Chrome trace, compressed with gzip; Perfetto and chrome://tracing open it as it is."""

    name: str
    size_bytes: int
    path: str
    """On the gateway's machine."""


@router.get("/profiles")
async def profiles(experiment_id: str, gateway: Gateway, after: Cursor = None, limit: Limit = 100) -> Page[ProfileView]:
    """List the traces that trainer and engines recorded of chosen steps (``profiler`` of the spec), by name.

    Raises:
        NotFound: there is no such experiment.
    """
    folder = _folder(gateway.repository.get(experiment_id))

    def found() -> list[ProfileView]:
        try:
            sizes = sizes_beneath(folder.parent.parent, f"{folder.parent.name}/{folder.name}")
        except OSError:
            return []
        names = sorted(name for name in sizes if NAME.fullmatch(name))
        return [ProfileView(name=name, size_bytes=sizes[name], path=str(folder / name)) for name in names]

    return page_of([(each.name, each) for each in await asyncio.to_thread(found)], after, limit)


@router.get("/profiles/{name}", response_class=FileResponse)
async def profile(experiment_id: str, name: str, gateway: Gateway) -> FileResponse:
    """Send one of them.

    Raises:
        NotFound: there is no such experiment or trace.
    """
    folder = _folder(gateway.repository.get(experiment_id))
    missing = NotFound(f"{experiment_id} has no profile {name[:200]!r}", experiment_id=experiment_id)
    if NAME.fullmatch(name) is None:
        raise missing
    try:
        where = f"{folder.parent.name}/{folder.name}/{name}"
        return OpenedFile(await asyncio.to_thread(open_beneath, folder.parent.parent, where))
    except OSError:
        raise missing from None


def _folder(experiment: Experiment) -> Path:
    return Path(experiment.record.directory) / PROFILES
