"""The pages of shared memory that an image lies in: reserved, and made known to a process, before they are used."""

import contextlib
import ctypes
import errno
import mmap
import os
from io import FileIO
from pathlib import Path

from shared.errors import WeightTransferFailed
from shared.faults.armed import armed
from shared.faults.sites import Site

_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23
"""Of Linux since 5.14."""


def populate(mapped: mmap.mmap, span: range | None = None) -> None:
    """Make the process know all pages at once, which is cheaper than one fault after the other.

    Args:
        mapped: the mapping.
        span: bytes that are to be written; None for all, to be read.

    Not by MAP_POPULATE: CPython keeps its lock while it maps, up to 0.7 s per GiB, and no other thread gets on.
    """
    advice = _MADV_POPULATE_READ if span is None else _MADV_POPULATE_WRITE
    span = range(len(mapped)) if span is None else span
    first = span.start // mmap.PAGESIZE * mmap.PAGESIZE
    start = ctypes.c_char.from_buffer(mapped)
    # Where the system does not know the advice, pages are found one by one. ``mmap.madvise`` would keep the lock too.
    with contextlib.suppress(AttributeError):
        advise = ctypes.CDLL(None).madvise
        advise(ctypes.c_void_p(ctypes.addressof(start) + first), ctypes.c_size_t(span.stop - first), advice)


def reserve_range(file: FileIO, path: Path, span: range) -> None:
    """Take the room now: a page that is missing later would be a bus error in the middle of a copy."""
    try:
        if (faults := armed()) is not None:
            faults.hit(Site.WEIGHTS_IMAGE)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), span.start, len(span))
        else:
            file.truncate(max(span.stop, os.fstat(file.fileno()).st_size))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise WeightTransferFailed(
            f"{path.parent} ran out of room for a weight image, at bytes {span.start} to {span.stop}"
        ) from error
