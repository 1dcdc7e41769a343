"""Names by which the episodes of a process are given back when it has ended, whoever notices.

Each process that plays has a name that nobody else knows, and a file of that name here, locked for as long as it lives:
the kernel unlocks it however it ends. Whoever begins to play finds the files of those that have ended, gives back what
they held and takes it at once, where otherwise their leases would have to end.
"""

import fcntl
import hashlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

PREFIX = "."
"""Of a file that is not locked yet."""


def folder_of(experiment: str) -> Path:
    """Name the folder of an experiment's players of this user on this machine; nobody else may read it.

    Raises:
        OSError: it cannot be made.
    """
    whole = Path(tempfile.gettempdir()) / f"flotilla-agents-{os.getuid()}"
    whole.mkdir(mode=0o700, exist_ok=True)
    if whole.is_symlink() or whole.stat().st_uid != os.getuid() or whole.stat().st_mode & 0o077:
        raise PermissionError(f"{whole} is not this user's alone")
    folder = whole / hashlib.sha256(experiment.encode()).hexdigest()[:24]
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@contextmanager
def held(folder: Path) -> Iterator[str]:
    """Give this process a name, for as long as the block lasts; one that is killed leaves its file, unlocked."""
    name = secrets.token_hex(16)
    path = folder / name
    with (folder / f"{PREFIX}{name}").open("x") as file:
        # Locked before it has its name: nobody finds it unlocked while this lives. Programs that are started have no
        # part in the lock.
        fcntl.flock(file, fcntl.LOCK_EX)
        Path(file.name).rename(path)
        try:
            yield name
        finally:
            path.unlink(missing_ok=True)


@contextmanager
def left_by_ended(folder: Path) -> Iterator[list[str]]:
    """Give the names of those that have ended without a word; whoever else looks meanwhile does not find them.

    What is still in the list at the end of the block is found again.
    """
    with ExitStack() as locked:
        found = []
        for path in folder.iterdir():
            if path.name.startswith(PREFIX):
                continue
            with suppress(OSError):  # it lives, is looked at by another, or is gone
                file = path.open("r+")
                locked.callback(file.close)
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found.append(path.name)
        left = list(found)
        yield left
        for name in set(found).difference(left):
            (folder / name).unlink(missing_ok=True)
