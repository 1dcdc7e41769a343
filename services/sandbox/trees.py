"""The service's directory, what services that were killed have left of theirs, and removing either.

Programs choose what is in these directories: any depth, any name, any mode.
"""

import fcntl
import logging
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flotilla.shared.host.control_groups import Mounts

log = logging.getLogger(__name__)

FEW = 16
SMALL_BYTES = 1 << 20
"""So many files of so many bytes together are removed in less time than it takes to have a thread do it."""


def remove_if_small(path: Path) -> bool:
    """Remove a directory that holds a few small files and nothing else, and return whether it was one."""
    try:
        found: list[Path] = []
        with os.scandir(path) as entries:
            for entry in entries:
                if len(found) == FEW or not _is_small(entry.stat(follow_symlinks=False)):
                    return False
                found.append(Path(entry.path))
        for file in found:
            file.unlink()
        path.rmdir()
    except OSError:
        return False
    return True


def _is_small(status: os.stat_result) -> bool:
    return status.st_size <= SMALL_BYTES // FEW and not stat.S_ISDIR(status.st_mode)


def remove_tree(path: Path) -> None:
    """Remove a directory with all that is in it; nothing happens if there is none. No process may use it any more.

    Whatever lies deeper is first moved to the top: so neither the depth of the tree nor the length of its paths
    matters, and never more than two directories are open.

    Raises:
        OSError: something cannot be removed.
    """
    try:
        top = _open(path.name, at=None, parent=path.parent)
    except FileNotFoundError:
        return
    try:
        moved = 0
        while names := _names(top):
            for name in names:
                if not _is_directory(name, top):
                    os.unlink(name, dir_fd=top)
                    continue
                moved = _hoist(name, top, moved)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    path.rmdir()


def _hoist(name: str, top: int, moved: int) -> int:
    """Empty a directory: move its directories to the top under generated names, remove the rest."""
    directory = _open(name, at=top)
    try:
        for inner in _names(directory):
            if not _is_directory(inner, directory):
                os.unlink(inner, dir_fd=directory)
                continue
            # Moving a directory changes its entry "..", which needs the right to write to it.
            os.close(_open(inner, at=directory))
            moved = _move_up(inner, directory, top, moved)
    finally:
        os.close(directory)
    return moved


def _move_up(name: str, directory: int, top: int, moved: int) -> int:
    while True:
        moved += 1
        target = f"flotilla-{moved}"
        try:
            os.stat(target, dir_fd=top, follow_symlinks=False)
        except FileNotFoundError:
            os.rename(name, target, src_dir_fd=directory, dst_dir_fd=top)
            return moved


def _names(directory: int) -> list[str]:
    with os.scandir(directory) as entries:
        return [entry.name for entry in entries]


def _is_directory(name: str, at: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode)


def _open(name: str, *, at: int | None, parent: Path | None = None) -> int:
    """Open a directory and give its owner all rights to it.

    Raises:
        OSError: it is none, or a link.
    """
    where = str(parent / name) if parent is not None else name
    found = os.open(where, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    try:
        Path(f"/proc/self/fd/{found}").chmod(0o700)
        return os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(found)


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
    """Remove directories of this user's services that have ended: their lock is free."""
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


def sweep_groups(mounts: "Mounts") -> None:
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
