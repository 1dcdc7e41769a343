"""Child processes: how they are started, and that they never outlive their owner."""

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

PR_SET_PDEATHSIG = 1
REAP_SECONDS = 10.0
POLL_SECONDS = 0.02
LOOK_SECONDS = 1.0

log = logging.getLogger(__name__)


def birth_of(pid: int) -> str | None:
    """Name the process that has an id now, by the boot and the moment that it began in: ids are given again.

    Returns:
        None where there is none, or only its exit code is left (a zombie).
    """
    try:
        # The program's name is in brackets, and may hold any; the 22nd field is when the process began.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None
    return None if fields[0] in {b"Z", b"X"} else f"{boot}/{fields[19].decode()}"


def python_module(name: str, *arguments: str) -> list[str]:
    """Return the command that runs one of our modules with this interpreter.

    ``-P`` keeps the working directory, which is the user's, off the module path: a file ``random.py`` there would
    otherwise be imported in place of Python's own.
    """
    return [sys.executable, "-P", "-m", name, *arguments]


async def reap(
    process: asyncio.subprocess.Process, *, seconds: float = REAP_SECONDS, exited: asyncio.Event | None = None
) -> int | None:
    """Wait for the end of a child that was killed; return its exit code, or None if it did not end in time.

    SIGKILL does not end a process in uninterruptible sleep (disk, device): such processes are not awaited.

    Args:
        process: the child.
        seconds: longest time.
        exited: is set when it has ended; None: its pipes must be closed too, which its own children may hold open.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await (process.wait() if exited is None else exited.wait())
            return process.returncode
    log.error("a killed process does not end", extra={"pid": process.pid})
    return None


def kill(process: asyncio.subprocess.Process) -> None:
    """Kill a child; one that has just ended by itself keeps its exit code.

    ``Process.kill`` asks first whether the child lives, which takes the exit code away from the event loop: it then
    says 255.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def end_family() -> None:
    """Kill every process that descends from this one, and wait for their ends; blocks.

    All are found before any is killed: who loses its parent is not found any more. Nobody is reaped here: that is for
    whoever started them.
    """
    family = psutil.Process().children(recursive=True)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    end = time.monotonic() + REAP_SECONDS
    while left := [process.pid for process in family if _lives(process)]:
        if time.monotonic() > end:
            log.error("killed processes do not end", extra={"pids": left})
            return
        time.sleep(POLL_SECONDS)


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def die_with_parent(parent_pid: int | None = None, *, with_signal: int = signal.SIGTERM) -> None:
    """Ask the kernel to signal this process when its parent ends.

    Without the request (not Linux) nothing happens: the parent then ends its children itself.

    Args:
        parent_pid: the parent to expect; if it is gone already, this process ends at once.
        with_signal: the signal to get.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, with_signal, 0, 0, 0)
    if parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), with_signal)


def end_after(pid: int) -> None:
    """Have this process get SIGTERM when another one has ended, which need not be its parent; within a second."""
    birth = birth_of(pid)

    def wait() -> None:
        while birth is not None and birth_of(pid) == birth:
            time.sleep(LOOK_SECONDS)
        log.warning("the fleet has ended, and so does this process", extra={"pid": pid})
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="end after", daemon=True).start()


def tie_to_parent() -> Callable[[], None] | None:
    """Return a ``preexec_fn`` that ties a program which is not ours to this process; None where there is no such call.

    The library is loaded before the fork: between fork and exec the child may make system calls only.
    """
    if sys.platform != "linux":
        return None
    libc, parent = ctypes.CDLL(None, use_errno=True), os.getpid()

    def tie() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return tie
