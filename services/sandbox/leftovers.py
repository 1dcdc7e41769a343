"""The service's directory, and those that services which were killed have left."""

import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.sandbox.trees import remove_tree

log = logging.getLogger(__name__)

PREFIX = "flotilla-sandbox-"
LOCK = "in-use"


@contextmanager
def own_directory() -> Iterator[Path]:
    """Make a directory that is removed at the end, at the latest by the next service of this user that starts."""
    parent = Path(tempfile.gettempdir())
    sweep_leftovers(parent)
    directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield directory
    finally:
        remove_tree(directory)
        os.close(lock)


def sweep_leftovers(parent: Path) -> None:
    """Remove directories of this user's services that live no more: nobody holds their lock."""
    for directory in parent.glob(f"{PREFIX}*"):
        try:
            if directory.lstat().st_uid != os.getuid():
                continue
            # Without a lock file it is one that is just being made, or not ours.
            lock = os.open(directory / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_tree(directory)
            log.info("removed what an earlier service left", extra={"directory": str(directory)})
        except OSError:
            continue
        finally:
            os.close(lock)
