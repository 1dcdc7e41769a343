"""The guard's one pass: say ready, read a job, run it, answer."""

import base64
import errno
import json
import os
import signal
import stat
import sys
from pathlib import Path, PurePosixPath

from services.sandbox.guard import seccomp
from services.sandbox.guard.job import (
    EXITED,
    KILL_NAMESPACE,
    KILL_UID,
    READY,
    Confinement,
    Job,
    JobResult,
)
from services.sandbox.guard.process import run_phase


def main() -> None:
    """Run one job from stdin and write its result to stdout."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    seccomp.set_dumpable(False)  # the program may have our uid: it must not read our memory nor our descriptors
    seccomp.become_reaper()
    _say(READY)
    text = sys.stdin.buffer.read()
    if not text:
        return  # the service went away before it had a job
    try:
        result = run_job(Job.from_wire(json.loads(text)))
    except Exception as error:  # whatever went wrong in here is the sandbox's fault and must be told
        result = JobResult(error=f"{type(error).__name__}: {error}"[:1000])
    _say(json.dumps(result.to_wire()).encode())


def _say(message: bytes) -> None:
    sys.stdout.buffer.write(message)
    sys.stdout.buffer.flush()


def run_job(job: Job) -> JobResult:
    """Write the files, run the phases until one fails, collect the files."""
    check_kill_scope(job.confinement)
    for path, content in job.files.items():
        target = Path(job.directory, path)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        target.write_bytes(base64.b64decode(content))
    phases = []
    for phase in job.phases:
        phases.append(run_phase(phase, job))
        if phases[-1].outcome != EXITED or phases[-1].return_code != 0:
            break
    files, notes = fetch(job)
    return JobResult(phases=tuple(phases), files=files, notes=tuple(notes))


def check_kill_scope(confinement: Confinement) -> None:
    """Make sure that a signal to everything reaches only the program, before one is ever sent.

    Raises:
        PermissionError: it would reach further.
    """
    if confinement.kill_scope == KILL_NAMESPACE and os.getppid() != 1:
        raise PermissionError("the guard is not in a process namespace of its own")
    if confinement.kill_scope == KILL_UID and (os.getuid() != confinement.uid or os.getuid() == 0):
        raise PermissionError(f"the guard has uid {os.getuid()}, not its own uid {confinement.uid}")


def fetch(job: Job) -> "tuple[dict[str, str], list[str]]":
    """Read the wanted files, base64 by path; links are not followed, and what is not a plain file is left out.

    Returns:
        The files, and a note for each that was left out although it exists.
    """
    found, notes = {}, []
    room = job.limits.fetch_bytes
    for path in job.fetch:
        try:
            content = read_plainly(job.directory, path, room)
        except FileNotFoundError:
            continue
        except OSError as error:
            notes.append(f"{path} was not fetched: {error.strerror or error}")
            continue
        room -= len(content)
        found[path] = base64.b64encode(content).decode()
    return found, notes


def read_plainly(directory: str, path: str, limit_bytes: int) -> bytes:
    """Read a plain file below ``directory`` without following any link.

    Raises:
        FileNotFoundError: there is none.
        OSError: it is a link or no plain file, or has more than ``limit_bytes``.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        parts = PurePosixPath(path).parts
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
