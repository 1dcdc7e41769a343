"""Files below a folder in which others write, or whose names come from others: opened without following any link.

Each component is opened by itself, relative to the folder before it, and none of them may be a link. So what is opened
is below the folder, whatever is renamed or replaced meanwhile. A second name of a file (a hard link) is let in: forks
make them, and the kernel lets only those make them who may write the file anyway (``fs.protected_hardlinks``).
"""

import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Of a pipe the opening would wait for a writer: it is refused like everything that is no file.
FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
LONGEST_NAME = 1024


class Outside(OSError):
    """A name leads out of its folder, by ``..`` or a link, or to something that is no file."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(errno.ELOOP, f"{why}: only files below the folder, without links, are opened", name)


def components(name: str) -> tuple[str, ...]:
    """Split a name of a file below a folder.

    Raises:
        Outside: it is absolute or empty, or has ``.``, ``..`` or empty components.
    """
    found = tuple(name.split("/"))
    if any(part in {"", ".", ".."} for part in found) or "\0" in name or len(name) > LONGEST_NAME:
        raise Outside(name[:LONGEST_NAME], "it is no plain name of a file in a folder")
    return found


def open_beneath(folder: Path, name: str, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """Open a regular file below a folder; returns its descriptor.

    Args:
        folder: where links are followed on the way to it, and not below.
        name: of the file, with ``/`` between its components.
        flags, mode: of ``open``.

    Raises:
        Outside: a component is a link, or ``..``, or what is there is no regular file.
        OSError: it is not there, or cannot be opened.
    """
    *folders, last = components(name)
    at = os.open(folder, FOLDER)
    try:
        for part in folders:
            below = _opened(name, part, FOLDER | os.O_NOFOLLOW, mode, at)
            os.close(at)
            at = below
        descriptor = _opened(name, last, flags | FILE, mode, at)
    finally:
        os.close(at)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Outside(name, f"{last} is no regular file")
    return descriptor


def _opened(name: str, part: str, flags: int, mode: int, at: int) -> int:
    try:
        return os.open(part, flags, mode, dir_fd=at)
    except OSError as error:
        # The first is said of a last component that is a link, the second of one before it.
        if error.errno == errno.ELOOP or (error.errno == errno.ENOTDIR and _is_link(part, at)):
            raise Outside(name, f"{part} is a link") from None
        raise


def _is_link(part: str, at: int) -> bool:
    try:
        return stat.S_ISLNK(os.stat(part, dir_fd=at, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def read_beneath(folder: Path, name: str) -> BinaryIO:
    """Open a file below a folder to read its bytes; raises as ``open_beneath``."""
    return os.fdopen(open_beneath(folder, name), "rb")


def same_file(descriptor: int) -> str:
    """Return a path that leads to an open file, whatever happens to its name: for libraries that want a path."""
    return f"/proc/self/fd/{descriptor}"


def link_to(descriptor: int, target: Path) -> None:
    """Give an open file a second name.

    Raises:
        OSError: the target exists, is on another disk, or the kernel does not allow it.
    """
    at = os.open(target.parent, FOLDER)
    try:
        # With the folder's descriptor Python calls linkat, which follows to the open file.
        os.link(same_file(descriptor), target.name, src_dir_fd=at, dst_dir_fd=at, follow_symlinks=True)
    finally:
        os.close(at)


def sizes_beneath(folder: Path, name: str | None = None) -> Mapping[str, int]:
    """Measure the regular files below a folder, in bytes, by their names from there; links are passed over.

    Args:
        folder: where links are followed on the way to it.
        name: of a folder below it, to be measured instead; without links.

    Raises:
        Outside: a component of the name is a link.
        OSError: there is no such folder.
    """
    top = os.open(folder, FOLDER)
    try:
        for part in () if name is None else components(name):
            below = _opened(name or "", part, FOLDER | os.O_NOFOLLOW, 0, top)
            os.close(top)
            top = below
        found = {}
        for place, _, files, at in os.fwalk(".", dir_fd=top, follow_symlinks=False):
            for each in files:
                about = os.stat(each, dir_fd=at, follow_symlinks=False)
                if stat.S_ISREG(about.st_mode):
                    found[str(Path(place, each))] = about.st_size
        return found
    finally:
        os.close(top)
