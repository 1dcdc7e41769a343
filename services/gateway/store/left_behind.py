"""A database that a gateway has left in its data directory, for those who only look.

It may come from somebody else, and a gateway may have been killed over it: it stays as it is, and of what it says, no
folder outside its own is believed.
"""

import shutil
import time
from pathlib import Path
from typing import Final

from flotilla.shared.errors import Conflict, Unavailable

DATABASE: Final = "gateway.sqlite"
EXPERIMENTS: Final = "experiments"
QUIET_SECONDS: Final = 0.03
"""Files' times have ticks of a hundredth of a second at most: what is written later than this has another time."""
COPY_SECONDS: Final = 20.0
"""Longest time to find a moment in which nobody writes the database itself; its log of writes may grow meanwhile."""


def copy_database(folder: Path, place: Path) -> None:
    """Copy a database with what SQLite keeps beside it, as of one moment, without a lock or a write of ours.

    Write-ahead frames have checksums, and count up to the last commit that is whole: those may be added meanwhile, as
    long as none is moved to the database. A rollback journal belongs to one state of the database.

    Args:
        folder: a data directory.
        place: gets the copy, of the same name.

    Raises:
        OSError: a file cannot be read.
        Unavailable: there was no quiet moment.
    """
    database, copied = folder / DATABASE, place / DATABASE
    end = time.monotonic() + COPY_SECONDS
    while time.monotonic() < end:
        before = _state_of(database)
        time.sleep(QUIET_SECONDS)
        if _state_of(database) != before:
            continue
        for suffix in ("", "-journal", "-wal"):
            _beside(copied, suffix).unlink(missing_ok=True)
            try:
                shutil.copyfile(_beside(database, suffix), _beside(copied, suffix))
            except FileNotFoundError:
                if not suffix:
                    raise
        if _state_of(database) == before:
            return
    raise Unavailable("it is written all the time: look at the page of the fleet that works on it")


def _beside(database: Path, suffix: str) -> Path:
    return database.with_name(f"{database.name}{suffix}")


def _state_of(database: Path) -> list[tuple[int, int, int] | None]:
    """Return what differs once the database, or a journal of it, was written."""
    found: list[tuple[int, int, int] | None] = []
    for suffix in ("", "-journal"):
        try:
            facts = _beside(database, suffix).stat()
        except FileNotFoundError:
            found.append(None)
        else:
            found.append((facts.st_ino, facts.st_size, facts.st_mtime_ns))
    return found


def directory_of(folder: Path, experiment_id: str, recorded: str) -> Path:
    """Find an experiment's files below the folder, which may have been moved since.

    Returns:
        An absolute path below the folder, where there is nothing if nothing was left.

    Raises:
        Conflict: what has its name in the folder is elsewhere.
    """
    within, here = folder.resolve(), folder.resolve() / EXPERIMENTS / experiment_id
    for each in (here, Path(recorded)):
        place = each.resolve()
        if place.is_dir() and place != within and place.is_relative_to(within):
            return place
    if here.resolve() == within or not here.resolve().is_relative_to(within):
        raise Conflict(f"{here} leads out of {folder}, from where no files are shown: put them into the folder")
    return here
