"""A gateway of runs that are over: their databases, read into memory, and nothing that works on them.

The same routes answer as of a gateway at work, so the page shows run folders like a fleet. Nothing is written but
the samples' index beside the samples, and what was not stored is empty, such as the ledger of a run that had not ended.
A database may be foreign: no folder outside its own is trusted.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Final

from alembic.util import CommandError
from sqlalchemy.exc import SQLAlchemyError

from flotilla.services.gateway.settings import GatewaySettings
from flotilla.services.gateway.state import GatewayState
from flotilla.services.gateway.store.base import Store
from flotilla.services.gateway.store.left_behind import DATABASE, copy_database, directory_of
from flotilla.services.gateway.store.memory import MemoryStore
from flotilla.services.gateway.store.sql import SqlStore
from flotilla.services.gateway.store.writes import AppendAudit, AppendEvent, PutCheckpoint, PutMetrics, PutRecord, Write
from flotilla.shared.clock import SystemClock
from flotilla.shared.errors import Conflict, FlotillaError, Unavailable
from flotilla.shared.schemas.task import Lane
from flotilla.shared.streams.memory.plane import MemoryDataPlane

PAGE: Final = 20_000
AUDITS: Final = 1000


@asynccontextmanager
async def recorded_state(settings: GatewaySettings, folders: Sequence[Path]) -> AsyncIterator[GatewayState]:
    """Read the databases of data directories and let routes answer from them.

    Args:
        settings: the token alone matters.
        folders: each with a ``gateway.sqlite``. One that a fleet works on is read as it is now.

    Raises:
        Conflict: two of them have an experiment of the same id, or a link leads out of one to an experiment's files.
        Unavailable: one cannot be read, is of a later release, or is written all the time.
    """
    store = MemoryStore()
    for folder in folders:
        await _read(folder, store)
    state = GatewayState(settings, store, _open_nothing, _ping_nothing, SystemClock())
    await state.load()
    try:
        yield state
    finally:
        await state.logs.aclose()
        await state.episodes.rollouts.aclose()
        state.samples.close()


def _open_nothing(experiment_id: str, lane: Lane, *, lease_seconds: float | None = None) -> MemoryDataPlane:
    return MemoryDataPlane(lane)


async def _ping_nothing() -> None:
    """There is no data plane."""


async def _read(folder: Path, store: MemoryStore) -> None:
    """Add all of one database; the copy that is opened may be brought up to date, the database itself stays."""
    with tempfile.TemporaryDirectory(prefix="flotilla-page-") as place:
        copied = Path(place)
        try:
            await asyncio.to_thread(copy_database, folder, copied)
            kept = await SqlStore.open(f"sqlite:///{copied / DATABASE}")
            try:
                await _read_all(folder, kept, store)
            finally:
                await kept.close()
        except Conflict:
            raise
        except (OSError, SQLAlchemyError, CommandError, FlotillaError, ValueError, TypeError) as error:
            cause = error.detail if isinstance(error, FlotillaError) else str(error)
            raise Unavailable(f"{folder / DATABASE} cannot be read: {' '.join(cause.split())}") from error


async def _read_all(folder: Path, kept: Store, store: MemoryStore) -> None:
    known = {record.id for record in await store.experiments()}
    for record in await kept.experiments():
        if record.id in known:
            raise Conflict(f"{record.id} is in {folder} and in another of the folders: name one of them")
        directory = directory_of(folder, record.id, record.directory)
        await store.apply([PutRecord(replace(record, directory=str(directory)))])
        await _read_series(kept, store, record.id)


async def _read_series(kept: Store, store: MemoryStore, experiment_id: str) -> None:
    after = 0
    while rows := await kept.metrics(experiment_id, names=(), after=after, limit=PAGE):
        await store.apply([PutMetrics(experiment_id, [point for _, point in rows])])
        after = rows[-1][0]
    after = 0
    while events := await kept.events(experiment_id, after=after, limit=PAGE):
        when = [datetime.fromisoformat(event.at).timestamp() for event in events]
        await store.apply(
            [AppendEvent(experiment_id, each.type, at, each.data) for at, each in zip(when, events, strict=True)]
        )
        after = events[-1].id
    writes: list[Write] = [PutCheckpoint(experiment_id, each) for each in await kept.checkpoints(experiment_id)]
    writes += [AppendAudit(each) for each in reversed(await kept.audit(f"experiments/{experiment_id}", limit=AUDITS))]
    writes += [PutRecord(each) for each in await kept.publications(experiment_id)]
    await store.apply(writes)
