"""``flotilla backup`` and ``flotilla restore``: a fleet's stores, copied while it works, and put back elsewhere."""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flotilla.backup.parts import Stores, lines_of, make_backup, read_about, restore_backup, rights_of
from flotilla.cli.exit_codes import ExitCode
from flotilla.cli.output import new_console
from flotilla.cli.redis_server import LocalRedis
from flotilla.connection import FleetInfo
from flotilla.services.gateway.store.left_behind import DATABASE
from flotilla.shared.environment.settings import secret_from


async def backup(arguments: argparse.Namespace) -> int:
    """Copy what a fleet knows into a new folder.

    Raises:
        Conflict: the folder is there already.
        Unavailable: a store cannot be read, or no fleet is named and none runs.
    """
    console, data = new_console(), Path(arguments.data)
    redis_url = secret_from(os.environ, "FLOTILLA_REDIS_URL") or FleetInfo.read(data).redis_url
    stores = Stores(data, _database_url(data), redis_url)
    folder = Path(arguments.folder)
    await make_backup(stores, folder, lambda line: console.print(line, markup=False), with_token=arguments.token_file)
    for line in lines_of(folder):
        console.print(line, markup=False)
    return ExitCode.DONE


async def restore(arguments: argparse.Namespace) -> int:
    """Restore a backup into empty stores, or only report what would be lost.

    Raises:
        Conflict: a store is not empty.
        InvalidRequest: the folder is no complete backup.
        Unavailable: a store cannot be written.
    """
    console, folder, data = new_console(), Path(arguments.folder), Path(arguments.data)
    about = read_about(folder)
    console.print(f"backup of {about.at}", markup=False)
    for line in lines_of(folder):
        console.print(line, markup=False)
    for line in rights_of(folder):
        what = "restored" if arguments.with_rights else "left out without --with-rights"
        console.print(f"{line} ({what})", markup=False)
    if arguments.dry_run:
        return ExitCode.DONE
    with _redis(data) as redis_url:
        stores = Stores(data, _database_url(data), redis_url)
        rights = arguments.with_rights
        await restore_backup(folder, stores, lambda line: console.print(line, markup=False), with_rights=rights)
    return ExitCode.DONE


def _database_url(data: Path) -> str:
    return secret_from(os.environ, "FLOTILLA_DATABASE_URL") or f"sqlite:///{data / DATABASE}"


@contextmanager
def _redis(data: Path) -> Iterator[str]:
    """Find the server that is named, else run the one that the fleet of this directory will have."""
    named = secret_from(os.environ, "FLOTILLA_REDIS_URL")
    if named:
        yield named
        return
    data.mkdir(mode=0o700, parents=True, exist_ok=True)  # before a Redis server makes it, readable for others
    with LocalRedis(data / "redis") as server:
        yield server.url
