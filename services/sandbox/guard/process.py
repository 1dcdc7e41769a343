"""Starting one command in its confinement, feeding and draining it, and ending everything it started.

The guard is a single thread that forks. It is the reaper of all orphans below it, so nothing that the command starts
can leave its sight, and a command is over only when every process below the guard is gone.
"""

import base64
import os
import platform
import selectors
import signal
import time
from contextlib import suppress
from pathlib import Path

from services.sandbox.guard import landlock, seccomp
from services.sandbox.guard.job import (
    EXITED,
    KILL_DESCENDANTS,
    NOT_STARTED,
    OVER_LIMIT,
    TIMED_OUT,
    Confinement,
    Job,
    Phase,
    PhaseResult,
)
from services.sandbox.guard.watch import descendants, find_excess, is_time_up
from services.sandbox.limits import apply_rlimits

PARENT = os.getppid()
"""Who started the guard: when it is gone, the program ends."""
POLL_SECONDS = 0.05
CHUNK_BYTES = 65536
KILL_SECONDS = 5.0
OWN_PROCESSES = 3
"""The isolation's own processes, which count for the uid too."""


class Drain:
    """Keeps the first bytes of a stream and reads the rest to throw it away."""

    def __init__(self, descriptor: int, limit_bytes: int) -> None:
        self.descriptor = descriptor
        self._limit_bytes = limit_bytes
        self._kept = bytearray()
        self._is_cut = False
        os.set_blocking(descriptor, False)

    def read(self) -> bool:
        """Read what there is; False at the end of the stream."""
        try:
            piece = os.read(self.descriptor, CHUNK_BYTES)
        except BlockingIOError:
            return True
        room = self._limit_bytes - len(self._kept)
        self._kept += piece[:room]
        self._is_cut = self._is_cut or len(piece) > room
        return bool(piece)

    def read_rest(self) -> None:
        """Read what is left once no writer is."""
        while self.read():
            pass

    def text(self) -> str:
        """Return what was kept as base64; a cut stream ends with a note, so that it equals no expected output."""
        note = f"\n[output cut after {self._limit_bytes} bytes]\n".encode() if self._is_cut else b""
        return base64.b64encode(bytes(self._kept) + note).decode()


def run_phase(phase: Phase, job: Job) -> PhaseResult:
    """Run one command until it ends, exceeds a limit, or its time is over; then end all that it left behind."""
    started = time.monotonic()
    given = base64.b64decode(phase.stdin)
    child_stdin, stdin = os.pipe()
    stdout, child_stdout = os.pipe()
    stderr, child_stderr = os.pipe()
    failure, child_failure = os.pipe()
    pid = os.fork()
    if pid == 0:
        _become(phase, job, (child_stdin, child_stdout, child_stderr), child_failure)
    for descriptor in (child_stdin, child_stdout, child_stderr, child_failure):
        os.close(descriptor)
    with os.fdopen(failure, "rb") as file:
        reason = file.read().decode(errors="replace")  # ends at once: exec closes the other end
    drains = [Drain(stdout, job.limits.output_bytes), Drain(stderr, job.limits.output_bytes)]
    outcome, detail = (_not_started(phase, job), reason) if reason else _attend(pid, phase, job, stdin, given, drains)
    if reason:
        os.close(stdin)
    status = _end_all(pid, job.confinement)
    for drain in drains:
        drain.read_rest()
        os.close(drain.descriptor)
    code = None if status is None or outcome == NOT_STARTED else os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - started
    return PhaseResult(phase.name, outcome, code, seconds, drains[0].text(), drains[1].text(), detail)


def _not_started(phase: Phase, job: Job) -> str:
    """Tell whose fault it is: what lies in the working directory was made by the program, and has to be there."""
    return OVER_LIMIT if Path(phase.argv[0]).is_relative_to(job.directory) else NOT_STARTED


def _become(phase: Phase, job: Job, streams: "tuple[int, int, int]", failure: int) -> None:
    """Turn the forked child into the command; never returns."""
    try:
        os.setsid()
        for target, descriptor in enumerate(streams):
            os.dup2(descriptor, target)
        os.chdir(job.directory)
        os.umask(0o077)
        # Python ignores these two, and what is ignored stays so through exec.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        others = len(_processes_of_uid()) if job.confinement.kill_scope == KILL_DESCENDANTS else OWN_PROCESSES
        _confine(phase, job, processes=job.limits.processes + others)
        os.execve(phase.argv[0], list(phase.argv), dict(job.environment))  # noqa: S606  no shell is the point
    except BaseException as error:  # whatever it is, the parent reports it and this copy of the guard must end
        os.write(failure, f"{type(error).__name__}: {error}".encode()[:1000])
    finally:
        os._exit(127)


def _confine(phase: Phase, job: Job, *, processes: int) -> None:
    confinement = job.confinement
    seccomp.set_dumpable(True)  # the guard is not, and its copy could not write the next file
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123
        file.write("1000")  # if memory runs out the program goes, not the guard
    apply_rlimits(
        job.limits,
        cpu_seconds=phase.timeout_seconds + 1,
        limits_address_space=phase.limits_address_space,
        processes=processes,
    )
    seccomp.forbid_new_privileges()
    if confinement.readable is not None:
        landlock.restrict(confinement.readable, confinement.writable)
    if confinement.has_seccomp:
        denies_metadata = confinement.denies_metadata and not phase.is_tool
        seccomp.install(seccomp.build_filter(platform.machine(), denies_metadata=denies_metadata))


def _processes_of_uid() -> "list[int]":
    """List the threads of this uid: where it is shared, RLIMIT_NPROC counts them all."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and entry.lstat().st_uid == os.getuid():
                found += [int(thread.name) for thread in (entry / "task").iterdir()]
    return found


def _attend(pid: int, phase: Phase, job: Job, stdin: int, given: bytes, drains: "list[Drain]") -> "tuple[str, str]":
    """Feed, drain and watch the command until it ends by itself or has to be ended; closes ``stdin``."""
    started = time.monotonic()
    deadline = started + phase.timeout_seconds
    next_look = time.monotonic() + POLL_SECONDS
    unsent = memoryview(given)
    with selectors.DefaultSelector() as selector:
        for drain in drains:
            selector.register(drain.descriptor, selectors.EVENT_READ, drain)
        os.set_blocking(stdin, False)
        selector.register(stdin, selectors.EVENT_WRITE)
        ending = _open_pidfd(pid)
        if ending is not None:
            selector.register(ending, selectors.EVENT_READ)
        try:
            while True:
                now = time.monotonic()
                if _has_ended(pid):
                    return EXITED, ""
                if os.getppid() != PARENT:
                    return OVER_LIMIT, "nobody waits for the answer any more"
                if now >= deadline:
                    if is_time_up(descendants(os.getpid()), now - started, phase.timeout_seconds):
                        return TIMED_OUT, f"time limit exceeded: {phase.timeout_seconds:g} s"
                    deadline = now + POLL_SECONDS
                if now >= next_look:
                    counts_deleted = job.confinement.is_quota_needed
                    excess = find_excess(os.getpid(), job.directory, job.limits, counts_deleted=counts_deleted)
                    if excess is not None:
                        return OVER_LIMIT, excess
                    # Where looking is slow, for there are very many processes, look less often.
                    next_look = time.monotonic() + max(POLL_SECONDS, 10 * (time.monotonic() - now))
                for key, _ in selector.select(max(0.0, min(next_look, deadline) - time.monotonic())):
                    if isinstance(key.data, Drain):
                        if not key.data.read():
                            selector.unregister(key.fd)
                    elif key.fd == stdin:
                        unsent = _feed(stdin, unsent)
                        if not unsent:
                            selector.unregister(stdin)
                            os.close(stdin)
                            stdin = -1
        finally:
            if stdin >= 0:
                os.close(stdin)
            if ending is not None:
                os.close(ending)


def _feed(descriptor: int, unsent: memoryview) -> memoryview:
    """Write some of it; an empty view means that there is no more to write, or nobody to read it."""
    try:
        return unsent[os.write(descriptor, unsent[:CHUNK_BYTES]) :]
    except BlockingIOError:
        return unsent
    except BrokenPipeError:
        return memoryview(b"")


def _open_pidfd(pid: int) -> "int | None":
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None  # an old kernel: the end is then seen at the next look


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end_all(main: int, confinement: Confinement) -> "int | None":
    """Kill and reap every process below the guard.

    Returns:
        The wait status of ``main``.

    Raises:
        TimeoutError: some could not be ended.
    """
    deadline = time.monotonic() + KILL_SECONDS
    main_status = None
    while True:
        _kill_all(confinement)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return main_status
            if pid == main:
                main_status = status
            if pid == 0:
                break
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes did not end within {KILL_SECONDS:g} s of SIGKILL")
        time.sleep(0.002)


def _kill_all(confinement: Confinement) -> None:
    if confinement.kill_scope == KILL_DESCENDANTS:
        for pid in descendants(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return
    # To all processes that this one may signal, except itself: those of its namespace, or of its uid. The kernel does
    # it in one go, which no fork can outrun.
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
