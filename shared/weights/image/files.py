"""The files of weight images: their names, places and locks, and which process may remove them."""

import fcntl
import os
import secrets
import socket
import tempfile
from io import FileIO
from pathlib import Path

import psutil

from flotilla.shared.errors import WeightTransferFailed

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (files there are created with O_EXCL and mode 0600)
HOST_ID = "FLOTILLA_HOST_ID"
"""Environment variable with a name of the host: processes with different ones never map each other's images."""

PREFIX = "flotilla-weights-"
SUFFIX = ".safetensors"


def new_name() -> str:
    """Make the name of a new image of this process."""
    return f"{PREFIX}{os.getpid()}-{secrets.token_hex(6)}{SUFFIX}"


def open_shared(path: Path, *, may_be_withdrawn: bool = False) -> FileIO:
    """Open an image under a shared lock, which lasts until the file and every mapping of it are gone.

    Args:
        path: of the image.
        may_be_withdrawn: whether an image will do that has no name any more.

    Raises:
        WeightTransferFailed: there is no such file, it is empty, withdrawn, or being written.
    """
    try:
        file = path.open("r+b", buffering=0)
    except OSError as error:
        raise WeightTransferFailed(f"cannot open the weight image: {error}") from error
    try:
        lock_shared(file, path, may_be_withdrawn=may_be_withdrawn)
    except BaseException:
        file.close()
        raise
    return file


def shared_memory_identity() -> str | None:
    """Name the shared memory that this process sees; None where there is none that others can be known to see.

    Equal for two processes that can open each other's images: same boot of the same kernel, same file system mounted
    there (containers usually have their own each), same user. ``FLOTILLA_HOST_ID`` adds a name.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        device = SHARED_MEMORY.stat().st_dev
    except OSError:
        return None
    named = os.environ.get(HOST_ID)
    return f"{boot}/{device}/{os.geteuid()}" + (f"/{named}" if named else "")


def host_identity() -> str:
    """Name this host: equal for two processes that see the same shared memory."""
    return shared_memory_identity() or os.environ.get(HOST_ID) or socket.gethostname()


def choose_directory(image_bytes: int, directory: Path | None = None) -> Path:
    """Choose where a new image goes: the given directory, else shared memory, else the directory for temporary files.

    Raises:
        WeightTransferFailed: none of them has that many bytes free.
    """
    rooms = []
    for candidate in default_directories() if directory is None else [directory]:
        free_bytes = psutil.disk_usage(str(candidate)).free
        if free_bytes >= image_bytes:
            return candidate
        rooms.append(f"{candidate} has {free_bytes}")
    raise WeightTransferFailed(f"no room for a weight image of {image_bytes} bytes: {', '.join(rooms)}")


def default_directories() -> list[Path]:
    """List where images are kept when nothing else is said, best first."""
    temporary = Path(tempfile.gettempdir())
    return [SHARED_MEMORY, temporary] if SHARED_MEMORY.is_dir() else [temporary]


def sweep(directory: Path | None = None) -> list[Path]:
    """Remove the images that dead processes left behind, and name them.

    An image stays while the process in its name lives, or while any process has it open. Call it when a service
    starts: an image under this process's own pid that is not open counts as left behind by a predecessor.
    """
    removed = []
    for place in default_directories() if directory is None else [directory]:
        for path in place.glob(f"{PREFIX}*"):
            pid = path.name.removeprefix(PREFIX).partition("-")[0]
            # A restarted container gives the same number again.
            if pid.isdecimal() and (int(pid) == os.getpid() or not psutil.pid_exists(int(pid))) and _remove_free(path):
                removed.append(path)
    return removed


def lock_shared(file: FileIO, path: Path, *, may_be_withdrawn: bool = False) -> None:
    """Take a shared lock on an opened image. Errors as of :func:`open_shared`."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise WeightTransferFailed(f"the weight image {path.name} is being written") from None
    status = os.fstat(file.fileno())
    if status.st_size == 0 or not (may_be_withdrawn or is_at(file, path)):
        raise WeightTransferFailed(f"the weight image {path.name} is {'withdrawn' if status.st_size else 'empty'}")


def is_at(file: FileIO, path: Path) -> bool:
    """Whether a path leads to an opened file: it may have been removed, or have got another name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _remove_free(path: Path) -> bool:
    try:
        with path.open("rb", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except OSError:  # another process holds it, removed it first, or owns it under another user
        return False
    return True
