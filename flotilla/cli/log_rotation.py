"""Bounds on the log of a process of a local fleet: a full one is copied to ``NAME.log.1``, and emptied.

The process writes on, at the end of the same file, and knows nothing of it. What is lost, at most, is what it writes
between the last read and the emptying, which follow each other. A fleet that is killed between the two has the lines
twice.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path


def older_log(path: Path, number: int) -> Path:
    """Return the place of an older file; the newest of them is number 1."""
    return path.with_name(f"{path.name}.{number}")


def older_logs(path: Path) -> Iterator[Path]:
    """Go through the older files that there are, the newest first."""
    number = 1
    while (older := older_log(path, number)).is_file():
        yield older
        number += 1


def rotate(path: Path, max_bytes: int, num_older: int) -> bool:
    """Copy a log that is full, empty it, and remove the oldest; gives whether it was full.

    Args:
        path: of the log.
        max_bytes: from which on it is full.
        num_older: files kept beside it, at least 1.

    Raises:
        OSError: a file cannot be written, such as on a full disk: the log stays as it is.
    """
    if not path.is_file() or path.stat().st_size < max_bytes:
        return False
    for excess in list(older_logs(path))[num_older - 1 :]:
        excess.unlink()
    fresh = path.with_name(f"{path.name}.new")
    with path.open("rb") as log, fresh.open("wb") as copy:
        shutil.copyfileobj(log, copy)
        # The older ones move only once there is a whole copy.
        for number in range(num_older - 1, 0, -1):
            if (older := older_log(path, number)).is_file():
                older.replace(older_log(path, number + 1))
        shutil.copyfileobj(log, copy)
        copy.flush()
        fresh.replace(older_log(path, 1))
        os.truncate(path, 0)
    return True
