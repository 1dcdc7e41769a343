"""A backup as a whole: how it is made, what it says of itself, and how it comes back."""

import asyncio
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import BaseModel

from flotilla.backup.files import copy_experiment
from flotilla.backup.keys import dump_keys, restore_keys, summary_of
from flotilla.backup.losses import Parts, losses_of
from flotilla.backup.rows import dump_rows, experiments_of, restore_rows
from flotilla.shared.checkpoints.folders import CHECKPOINTS, complete
from flotilla.shared.clock import rfc3339
from flotilla.shared.errors import Conflict, InvalidRequest
from flotilla.shared.locations.allowed import GRANTS

FORMAT: Final = 1
ABOUT: Final = "backup.json"
DATABASE, PLANE, EXPERIMENTS, TOKEN = "database", "redis", "experiments", "token"
Say = Callable[[str], None]


class About(BaseModel, frozen=True):
    """What a backup says of itself; written last.

    Attributes:
        format: of the backup's files.
        revision: of the database's schema.
        at: when it was begun, by RFC 3339.
        has_token: whether the operator's token is in it.
    """

    format: int
    revision: str
    at: str
    has_token: bool


@dataclass(frozen=True, slots=True)
class Stores:
    """Where a fleet keeps what it knows.

    Attributes:
        data: the gateway's data directory.
        database_url, redis_url: its servers.
    """

    data: Path
    database_url: str
    redis_url: str


async def make_backup(stores: Stores, target: Path, say: Say, *, with_token: bool = False) -> None:
    """Copy a fleet's stores into a new folder while it works; the folder has its name once it is complete.

    Args:
        stores: of the fleet.
        target: the folder.
        say: gets a line for each part.
        with_token: also the operator's token, from which passes are derived.

    Raises:
        Conflict: the folder is there already.
        InvalidRequest: the token is wanted, and is no file of the data directory.
        Unavailable: a store cannot be read.
    """
    partial = target.with_name(f"{target.name}.partial")
    if await asyncio.to_thread(target.exists):
        raise Conflict(f"{target} is there already: choose another folder")
    await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)
    for name in (DATABASE, PLANE, EXPERIMENTS):
        (partial / name).mkdir(mode=0o700, parents=True)
    partial.chmod(0o700)
    began = time.time()
    revision = await asyncio.to_thread(dump_rows, stores.database_url, partial / DATABASE)
    experiments = experiments_of(partial / DATABASE)
    say(f"database     {len(experiments)} experiments, schema {revision}")
    ids = [each.id for each in experiments]
    await dump_keys(stores.redis_url, ids, partial / PLANE)
    say("data plane   read")
    for each in experiments:
        source, place = Path(each.directory), partial / EXPERIMENTS / each.id
        num_bytes = await asyncio.to_thread(copy_experiment, source, place)
        say(f"files        {each.id}: {num_bytes / 1e6:.1f} MB")
    if (stores.data / GRANTS).exists():
        await asyncio.to_thread(_copy_private, stores.data / GRANTS, partial / GRANTS)
    if with_token:
        await asyncio.to_thread(_copy_token, stores.data / TOKEN, partial / TOKEN)
    about = About(format=FORMAT, revision=revision, at=rfc3339(began), has_token=with_token)
    (partial / ABOUT).write_text(about.model_dump_json() + "\n")
    partial.rename(target)


def _copy_token(source: Path, target: Path) -> None:
    try:
        _copy_private(source, target)
    except FileNotFoundError as error:
        raise InvalidRequest(f"the operator's token is not in {source}: {error.strerror}") from None


def _copy_private(source: Path, target: Path) -> None:
    content = source.read_bytes()
    with os.fdopen(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def read_about(folder: Path) -> About:
    """Read what a backup says of itself.

    Raises:
        InvalidRequest: it is no complete backup, or one of a later release.
    """
    try:
        about = About.model_validate_json((folder / ABOUT).read_text())
    except (OSError, ValueError):
        raise InvalidRequest(f"{folder} is no complete backup: it has no {ABOUT}") from None
    if about.format != FORMAT:
        raise InvalidRequest(f"{folder} was written by another release (format {about.format}, here {FORMAT})")
    return about


def lines_of(folder: Path) -> list[str]:
    """Say what a backup holds of each experiment, and what would be lost."""
    lines = []
    for each in experiments_of(folder / DATABASE):
        checkpoints = complete(folder / EXPERIMENTS / each.id / CHECKPOINTS)
        newest = next((stored.step for stored in checkpoints), 0)
        plane = summary_of(folder / PLANE / f"{each.id}.jsonl")
        parts = Parts(each.step, plane, newest, is_started=each.started_at is not None)
        committed = "nothing" if plane is None else f"committed step {plane.committed}, {len(plane.plans)} plans"
        lines.append(f"{each.id}: {each.state}; database step {each.step}; Redis {committed}; checkpoint {newest}")
        lines += [f"    lost: {loss}" for loss in losses_of(parts)] or ["    nothing is lost"]
    return lines


async def restore_backup(folder: Path, stores: Stores, say: Say) -> None:
    """Write a backup into stores that are empty; the database last, so that what broke off is no fleet.

    Raises:
        Conflict: one of them is not empty.
        InvalidRequest: it is no complete backup.
        Unavailable: a store cannot be written.
    """
    about = read_about(folder)
    experiments = experiments_of(folder / DATABASE)
    ids = [each.id for each in experiments]
    home = stores.data.resolve() / EXPERIMENTS
    for each in ids:
        if (home / each).exists():
            raise Conflict(f"{home / each} is there already: restore to another data directory")
    stores.data.mkdir(mode=0o700, parents=True, exist_ok=True)
    await restore_keys(stores.redis_url, ids, folder / PLANE)
    say("data plane   restored")
    for each in ids:
        await asyncio.to_thread(shutil.copytree, folder / EXPERIMENTS / each, home / each)
        say(f"files        {each}")
    directories = {each.id: (each.directory, str(home / each.id)) for each in experiments}
    await asyncio.to_thread(restore_rows, stores.database_url, folder / DATABASE, about.revision, directories)
    say("database     restored")
    if (folder / GRANTS).exists() and not (stores.data / GRANTS).exists():
        await asyncio.to_thread(_copy_private, folder / GRANTS, stores.data / GRANTS)
    if (folder / TOKEN).exists() and not (stores.data / TOKEN).exists():
        await asyncio.to_thread(_copy_token, folder / TOKEN, stores.data / TOKEN)
        say(f"token        {stores.data / TOKEN}")
