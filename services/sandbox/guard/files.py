"""A program's files: written before it begins, read when nothing of it runs.

Nothing of the guard loads pathlib: what the fork server's memory holds is copied in part with each fork.
"""

import binascii
import errno
import os
import stat
from collections.abc import Iterable

from flotilla.services.sandbox.guard.job import Job
from flotilla.services.sandbox.limits import Limits


def write_files(job: Job, directory: str) -> None:
    """Write the files of a job into an unused directory."""
    for path, content in job.files.items():
        write_file(directory, path, binascii.a2b_base64(content))


def write_file(directory: str, path: str, content: bytes) -> None:
    """Write a new file below an unused directory."""
    target = f"{directory}/{path}"
    if "/" in path:
        os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)  # noqa: PTH103, PTH120
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        unwritten = memoryview(content)
        while unwritten:
            unwritten = unwritten[os.write(descriptor, unwritten) :]
    finally:
        os.close(descriptor)


def fetch(directory: str, paths: Iterable[str], limits: Limits) -> "tuple[dict[str, str], list[str]]":
    """Read the wanted files, base64 by path; links are not followed, and what is not a plain file is left out.

    Returns:
        The files, and a note for each that was left out although it exists.
    """
    found, notes = {}, []
    room = limits.fetch_bytes
    for path in paths:
        try:
            content = read_plainly(directory, path, room)
        except FileNotFoundError:
            continue
        except OSError as error:
            notes.append(f"{path} was not fetched: {error.strerror or error}")
            continue
        room -= len(content)
        found[path] = binascii.b2a_base64(content, newline=False).decode()
    return found, notes


def read_plainly(directory: str, path: str, limit_bytes: int) -> bytes:
    """Read a plain file below ``directory`` without following any link.

    Raises:
        FileNotFoundError: there is none.
        OSError: it is a link or no plain file, or has more than ``limit_bytes``.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        parts = [part for part in path.split("/") if part not in ("", ".")]
        for index, part in enumerate(parts):
            # O_NONBLOCK: opening a named pipe would wait for a writer.
            kind = os.O_NONBLOCK if index == len(parts) - 1 else os.O_DIRECTORY
            inner = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | kind, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a plain file")
        if status.st_size > limit_bytes:
            raise OSError(errno.EFBIG, f"the fetched files have more bytes than allowed ({limit_bytes} left)")
        with os.fdopen(os.dup(descriptor), "rb") as file:
            return file.read(limit_bytes)
    finally:
        os.close(descriptor)
