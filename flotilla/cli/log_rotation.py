"""Bounds on the log of a process of a local fleet: a full one is copied to ``NAME.log.1``, and emptied.

The process writes on, at the end of the same file, and knows nothing of it. What is lost, at most, is what it writes
between the last read and the emptying, which follow each other. A fleet that is killed between the two has the lines
twice.
"""

import itertools
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

USUAL_MEBIBYTES: Final = 64
USUAL_OLDER: Final = 4
NUMBER: Final = re.compile(r"[1-9][0-9]{0,8}")


def older_log(path: Path, number: int) -> Path:
    """Return the place of an older file; the newest of them is number 1."""
    return path.with_name(f"{path.name}.{number}")


def older_logs(path: Path) -> Iterator[Path]:
    """Go through the older files that there are, the newest first."""
    prefix = f"{path.name}."
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    # Over gaps: a rotation that was broken off may have left one.
    ends = (each.name.removeprefix(prefix) for each in beside if each.name.startswith(prefix))
    numbers = [int(end) for end in ends if NUMBER.fullmatch(end)]
    yield from (each for number in sorted(numbers) if (each := older_log(path, number)).is_file())


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
        shutil.copyfileobj(log, copy)
        copy.flush()
        # The older ones move only once there is a whole copy, and only up to a gap, which they close.
        gap = next(number for number in itertools.count(1) if not older_log(path, number).is_file())
        for number in range(gap - 1, 0, -1):
            older_log(path, number).replace(older_log(path, number + 1))
        fresh.replace(older_log(path, 1))
        os.truncate(path, 0)
    return True
