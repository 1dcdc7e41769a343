"""The pages of shared memory that an image lies in: reserved or written, and made known to a process, ahead of use."""

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from flotilla.shared.errors import WeightTransferFailed
from flotilla.shared.faults.armed import armed
from flotilla.shared.faults.sites import Site

_MADV_POPULATE_READ = 22
"""Of Linux since 5.14."""


def populate(mapped: mmap.mmap) -> bool:
    """Make the process know all pages at once, which is cheaper than one fault after the other.

    Not by MAP_POPULATE: CPython keeps its lock while it maps, up to 0.7 s per GiB, and no other thread gets on.
    """
    return populate_range(mapped, range(len(mapped)))


def populate_range(mapped: mmap.mmap, span: range) -> bool:
    """Make the process know the pages of a range; False where the system does not know the advice, or has no room.

    Args:
        mapped: a whole file; pages of it that are missing are made.
        span: begins with a page.
    """
    start = ctypes.c_char.from_buffer(mapped, span.start)
    # Where the system does not know the advice, pages are found one by one. ``mmap.madvise`` would keep the lock too.
    with contextlib.suppress(AttributeError):
        advise = ctypes.CDLL(None).madvise
        failed = advise(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(span)), _MADV_POPULATE_READ)
        return bool(failed == 0)
    return False


def reserve_range(file: FileIO, path: Path, span: range) -> None:
    """Take the room now: a page that is missing later would be a bus error in the middle of a copy."""
    with _having_room(path, span):
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), span.start, len(span))
        else:
            file.truncate(max(span.stop, os.fstat(file.fileno()).st_size))


def write_range(file: FileIO, path: Path, position: int, data: memoryview) -> None:
    """Write all of it, taking the room that is missing."""
    num_written = 0
    with _having_room(path, range(position, position + len(data))):
        while num_written < len(data):
            num_written += os.pwrite(file.fileno(), data[num_written:], position + num_written)


@contextlib.contextmanager
def _having_room(path: Path, span: range) -> Iterator[None]:
    try:
        if (faults := armed()) is not None:
            faults.hit(Site.WEIGHTS_IMAGE)
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise WeightTransferFailed(
            f"{path.parent} ran out of room for a weight image, at bytes {span.start} to {span.stop}"
        ) from error
