"""The guard's one pass, in a fork of its own: read a job, make its place, run it, answer."""

import binascii
import errno
import json
import os
import stat
from pathlib import Path, PurePosixPath

from services.sandbox.guard import kernel, namespaces
from services.sandbox.guard.job import (
    EXITED,
    KILL_NAMESPACE,
    KILL_UID,
    LENGTH_BYTES,
    Confinement,
    Job,
    JobResult,
    Orders,
)
from services.sandbox.guard.process import Surroundings, run_phase

_DECODER = json.JSONDecoder()


def attend(caller: int, place: "int | Exception") -> None:
    """Run one job from a stream of the service and write its result there.

    Args:
        caller: the stream.
        place: what ``furnish`` returned, or raised.

    Raises:
        IsProgram: in the child that is the program.
    """
    length = int.from_bytes(_read(caller, LENGTH_BYTES), "big")
    text = _read(caller, length)
    if not text or len(text) < length:
        return  # the service went away before it had a job
    try:
        if isinstance(place, Exception):
            raise place
        job = Job.from_wire(_DECODER.raw_decode(text.decode())[0])
        result = run_job(job, Surroundings(caller, place))
    except Exception as error:  # whatever went wrong in here is the sandbox's fault and must be told
        result = JobResult(error=f"{type(error).__name__}: {error}"[:1000])
    answer = memoryview(json.dumps(result.to_wire()).encode())
    while answer:
        answer = answer[os.write(caller, answer) :]


def _read(stream: int, size: int) -> bytes:
    """Read so many bytes, or fewer at the end of the stream."""
    content = b""
    while len(content) < size and (piece := os.read(stream, size - len(content))):
        content += piece
    return content


def run_job(job: Job, surroundings: Surroundings) -> JobResult:
    """Write the files, run the phases until one fails, collect the files."""
    for path, content in job.files.items():
        write_file(job.directory, path, binascii.a2b_base64(content))
    phases = []
    for phase in job.phases:
        phases.append(run_phase(phase, job, surroundings))
        if phases[-1].outcome != EXITED or phases[-1].return_code != 0:
            break
    files, notes = fetch(job) if job.fetch else ({}, [])
    return JobResult(phases=tuple(phases), files=files, notes=tuple(notes))


def write_file(directory: str, path: str, content: bytes) -> None:
    """Write a new file below a directory in which nobody else works yet."""
    target = f"{directory}/{path}"
    if "/" in path:
        Path(target).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        unwritten = memoryview(content)
        while unwritten:
            unwritten = unwritten[os.write(descriptor, unwritten) :]
    finally:
        os.close(descriptor)


def furnish(orders: Orders) -> int:
    """Make the place of a run and give up every privilege that this took.

    Returns:
        See ``Surroundings.hardness``.

    Raises:
        OSError: the kernel refused, or a signal to everything would reach further than the program.
    """
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # otherwise this process's own files in /proc are root's
    scope, uid = orders.confinement.kill_scope, orders.confinement.uid
    if scope == KILL_NAMESPACE:
        check_kill_scope(orders.confinement)
        hardness = namespaces.furnish(orders.limits)
    else:
        hardness = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
        if uid is not None:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        check_kill_scope(orders.confinement)
    # The program may have our uid: it must not read our memory nor our descriptors.
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    return hardness


def check_kill_scope(confinement: Confinement) -> None:
    """Make sure that a signal to everything reaches only the program, before one is ever sent.

    Raises:
        PermissionError: it would reach further.
    """
    if confinement.kill_scope == KILL_NAMESPACE and os.getpid() != 1:
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
