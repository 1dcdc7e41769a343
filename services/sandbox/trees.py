"""Removing directories whose contents were chosen by a program: any depth, any name, any mode."""

import os
import stat
from pathlib import Path

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
    """Empty a directory: move its directories to the top under names of ours, remove the rest."""
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
