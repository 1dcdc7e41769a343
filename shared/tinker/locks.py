"""One change at a time of what is saved of models: gateway and trainer, and several gateways, change the same files."""

import fcntl
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from flotilla.shared.errors import Unavailable

log = logging.getLogger(__name__)

LOCK: Final = ".lock"
UNFINISHED: Final = ".unfinished"
"""Suffix of directories that are not complete yet, or being removed; deleted when a day old."""
LOCK_SECONDS: Final = 10.0
"""Changes are renames: only a process that was stopped in one holds the lock for so long."""
PAUSE_SECONDS: Final = 0.02


@contextmanager
def changing(saved: Path) -> Iterator[None]:
    """Lock a directory tree against changes by others while the block runs; blocks.

    Raises:
        Unavailable: another process did not release its lock in time.
    """
    end = time.monotonic() + LOCK_SECONDS
    with (saved / LOCK).open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    log.warning("a lock is held by another process", extra={"path": str(saved / LOCK)})
                    raise Unavailable("what is saved of models is being changed by another process") from None
                time.sleep(PAUSE_SECONDS)
        yield
