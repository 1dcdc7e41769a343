"""A backup as a whole: how it is made, its manifest, and how it is restored.

What would be lost if its parts were put together is said before anything is written.
"""

import asyncio
import os
import shutil
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from flotilla.backup.files import copy_experiment, restore_experiment
from flotilla.backup.keys import PlaneSummary, dump_keys, remove_keys, restore_keys, summary_of
from flotilla.backup.rows import dump_rows, experiments_of, restore_rows, tokens_of
from flotilla.shared.checkpoints.folders import CHECKPOINTS, complete
from flotilla.shared.clock import rfc3339
from flotilla.shared.errors import Conflict, FlotillaError, InvalidRequest
from flotilla.shared.files.beneath import read_beneath
from flotilla.shared.locations.allowed import GRANTS


@dataclass(frozen=True, slots=True)
class Parts:
    """An experiment's training progress in each part of a backup.

    Attributes:
        step: the newest step that the database knows.
        plane: what the data plane knew; None: nothing of it is there.
        checkpoint: step of the newest whole checkpoint; 0: there is none.
        is_started: whether the experiment has ever trained.
    """

    step: int
    plane: PlaneSummary | None
    checkpoint: int
    is_started: bool


def losses_of(parts: Parts) -> list[str]:
    """Return what would be lost, by the rule of ``shared/checkpoints/lineage.py``; empty: nothing."""
    if not parts.is_started:
        return []
    plane = parts.plane
    end = parts.checkpoint
    for step in plane.plans if plane is not None else ():
        if step == end + 1:
            end = step
    known = max(parts.step, plane.committed if plane is not None else 0, parts.checkpoint)
    found = []
    if plane is None:
        found.append("nothing of the data plane is there: every group that was not trained is lost, and its counts")
    if end < known:
        steps = f"step {known} is" if known == end + 1 else f"steps {end + 1} to {known} are"
        since = f"the checkpoint of step {parts.checkpoint}" if parts.checkpoint else "the model, without a checkpoint"
        found.append(f"{steps} trained again, from {since}; what they trained on counts as lost_with_checkpoint")
    return found


FORMAT: Final = 1
ABOUT: Final = "backup.json"
DATABASE, PLANE, EXPERIMENTS, TOKEN = "database", "redis", "experiments", "token"
Say = Callable[[str], None]


class About(BaseModel, frozen=True):
    """A backup's manifest; written last.

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
    with read_beneath(source.parent, source.name) as kept:
        content = kept.read()
    with os.fdopen(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def _text(folder: Path, name: str) -> str:
    with read_beneath(folder, name) as file:
        return file.read().decode()


def read_about(folder: Path) -> About:
    """Read a backup's manifest.

    Raises:
        InvalidRequest: it is no complete backup, or one of a later release.
    """
    try:
        about = About.model_validate_json(_text(folder, ABOUT))
    except (OSError, ValueError):
        raise InvalidRequest(f"{folder} is no complete backup: it has no {ABOUT}") from None
    if about.format != FORMAT:
        raise InvalidRequest(f"{folder} was written by another release (format {about.format}, here {FORMAT})")
    return about


def lines_of(folder: Path) -> list[str]:
    """Return what a backup holds of each experiment, and what would be lost."""
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


def rights_of(folder: Path) -> list[str]:
    """List what in a backup grants rights: it is restored only if the backup is trusted.

    Raises:
        InvalidRequest: it is damaged.
    """
    found = []
    for each in tokens_of(folder / DATABASE):
        bound = "" if each.experiment_id is None else f" of {each.experiment_id}"
        found.append(f"token {each.name!r}: {each.scope}{bound}")
    if (folder / TOKEN).exists():
        found.append("the operator's token")
    if (folder / GRANTS).exists():
        try:
            granted = _text(folder, GRANTS).splitlines()
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"this backup is damaged: {GRANTS} cannot be read: {error}") from None
        found += [f"a file of code that the fleet may run: {each!r}" for each in granted if each.strip()]
    return found


async def restore_backup(folder: Path, stores: Stores, say: Say, *, with_rights: bool = False) -> None:
    """Write a backup into stores that are empty; the database last, so that what broke off is no fleet.

    What was written is removed if the whole of it cannot be.

    Args:
        folder: the backup, which is not trusted.
        stores: of the fleet to come.
        say: gets a line for each part, and one for what could not be removed.
        with_rights: also what ``rights_of`` lists.

    Raises:
        Conflict: one of them is not empty.
        InvalidRequest: it is no complete backup, or has links, or keys of others.
        Unavailable: a store cannot be written.
    """
    about = read_about(folder)
    experiments = experiments_of(folder / DATABASE)
    home = stores.data.resolve() / EXPERIMENTS
    for each in experiments:
        if (home / each.id).exists():
            raise Conflict(f"{home / each.id} is there already: restore to another data directory")
    stores.data.mkdir(mode=0o700, parents=True, exist_ok=True)
    restored = _Restored([each.id for each in experiments], stores)
    try:
        await restore_keys(stores.redis_url, restored.ids, folder / PLANE)
        restored.has_keys = True
        say("data plane   restored")
        for each in experiments:
            place = home / each.id
            restored.paths.append(place)
            await _finished(
                asyncio.to_thread(
                    restore_experiment, folder, f"{EXPERIMENTS}/{each.id}", place, restored.is_unwanted.is_set
                ),
                restored.is_unwanted,
            )
            say(f"files        {each.id}")
        for name in (GRANTS, TOKEN) if with_rights else ():
            place = stores.data / name
            if (folder / name).exists() and not place.exists():
                restored.paths.append(place)
                _copy_private(folder / name, place)
                say(f"{name:<12} {place}")
        directories = {each.id: (each.directory, str(home / each.id)) for each in experiments}

        def write_rows() -> None:
            url, source = stores.database_url, folder / DATABASE
            restore_rows(url, source, about.revision, directories, with_rights=with_rights)
            restored.is_complete = True

        await _finished(asyncio.to_thread(write_rows), restored.is_unwanted)
        say("database     restored")
    except BaseException:
        if not restored.is_complete:
            await restored.remove(say)
        raise


@dataclass
class _Restored:
    """What a restore has written so far: none of it was there before."""

    ids: list[str]
    stores: Stores
    paths: list[Path] = field(default_factory=list)
    has_keys: bool = False
    is_complete: bool = False
    is_unwanted: threading.Event = field(default_factory=threading.Event)

    async def remove(self, say: Say) -> None:
        """Remove it; report what remains."""
        for path in self.paths:
            if path.is_dir():
                await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
            if path.exists():
                say(f"left behind  {path}: remove it before the next restore")
        if self.has_keys:
            try:
                await remove_keys(self.stores.redis_url, self.ids)
            except FlotillaError as error:
                patterns = ", ".join(f"{{exp:{each}}}*" for each in self.ids)
                say(f"left behind  the keys {patterns} in Redis: delete them before the next restore ({error})")


async def _finished(work: Coroutine[Any, Any, None], is_unwanted: threading.Event) -> None:
    """Wait for a thread, also where this is cancelled: what it writes cannot be removed before it has ended."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        is_unwanted.set()
        await asyncio.wait([task])
        raise
