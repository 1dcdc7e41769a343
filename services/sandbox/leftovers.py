"""The service's directory; and the directories and control groups that services which were killed have left."""

import fcntl
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flotilla.services.sandbox.trees import remove_tree
from flotilla.shared.host.control_groups import Mounts

log = logging.getLogger(__name__)

PREFIX = "flotilla-sandbox-"
LOCK = "in-use"
GROUP = re.compile(rf"{PREFIX}(\d+)-(?:\d+-)?[0-9a-f]{{8}}")
"""Name of a control group of a slot: the service's pid is in it."""


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


def sweep_groups(mounts: Mounts) -> None:
    """Remove control groups of this user's services that live no more, where this service makes its own.

    Only empty ones: the kernel removes no group with a process in it.
    """
    parents = {*mounts.controllers.values(), *([] if mounts.unified is None else [mounts.unified])}
    for directory in (found for parent in parents for found in parent.glob(f"{PREFIX}*")):
        named = GROUP.fullmatch(directory.name)
        if named is None or Path(f"/proc/{named[1]}").exists():
            continue
        try:
            if directory.lstat().st_uid == os.getuid():
                directory.rmdir()
                log.info("removed a control group that an earlier service left", extra={"group": str(directory)})
        except OSError:
            continue
