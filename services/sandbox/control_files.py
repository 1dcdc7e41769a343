"""Files of control groups, read and written in as few system calls as that takes: each run does it several times."""

import os
from pathlib import Path

MOST_BYTES = 65536


def read_control(file: Path) -> bytes:
    """Read a file.

    Raises:
        OSError: it cannot be read.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, MOST_BYTES)
    finally:
        os.close(descriptor)


def write_control(file: Path, value: int) -> None:
    """Write a number to a file.

    Raises:
        OSError: the kernel refused.
    """
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC)
    try:
        os.write(descriptor, b"%d" % value)
    finally:
        os.close(descriptor)
