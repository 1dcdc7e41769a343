"""Making what was written outlast the machine's own end."""

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Wait until a file's contents, or the names in a directory, are on the disk.

    Raises:
        OSError: there is nothing of that name, or the disk refuses.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
