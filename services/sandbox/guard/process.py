"""Starting one command in its confinement, feeding and draining it, and ending everything it started.

The guard is a single thread that forks. It is the reaper of all orphans below it, so nothing that the command starts
can leave its sight, and a command is over only when every process below the guard is gone.

A command that is the fork server's own command line (``python -s -B main.py``) is not executed: the forked child is
that interpreter already, stopped just before it opens ``main.py``, and goes on.
"""

import binascii
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from services.sandbox.guard import kernel, landlock, seccomp
from services.sandbox.guard.job import (
    EXITED,
    KILL_DESCENDANTS,
    NOT_STARTED,
    OVER_LIMIT,
    PHASE_OVER,
    STARVED,
    Confinement,
    Job,
    Phase,
    PhaseResult,
)
from services.sandbox.guard.watch import (
    POLL_SECONDS,
    Baseline,
    Blockage,
    descendants,
    find_excess,
    next_look,
    time_verdict,
)
from services.sandbox.limits import apply_rlimits, longest_seconds

CHUNK_BYTES = 65536
PIPE_BYTES = 1 << 20
KILL_SECONDS = 20.0
OWN_PROCESSES = 5
"""The isolation's own processes, which count for the uid too."""
NICENESS = 10
MOST_DESCRIPTORS = 1 << 20
MACHINE = os.uname().machine
STANDARD = ("stdin", "stdout", "stderr")


class IsProgram(BaseException):
    """Raised in the forked child that is to go on as the program: it leaves all frames of the guard.

    Args:
        is_session: whether the program is the interpreter of a session.
    """

    def __init__(self, is_session: bool) -> None:
        self.is_session = is_session


@dataclass(frozen=True)
class Surroundings:
    """What the guard holds open besides the command's streams.

    Attributes:
        caller: stream of the service; it can be read once nobody waits for the answer any more.
        hardness: the guard's own ``oom_score_adj``; its children inherit what is written there when they are forked.
    """

    caller: int
    hardness: int


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

    def read_present(self) -> None:
        """Read what a pipe can hold, not waiting for its end: its writers live, and are stopped."""
        for _ in range(PIPE_BYTES // CHUNK_BYTES):
            self.read()

    def text(self) -> str:
        """Return what was kept as base64; a cut stream ends with a note, so that it equals no expected output."""
        note = f"\n[output cut after {self._limit_bytes} bytes]\n".encode() if self._is_cut else b""
        return binascii.b2a_base64(bytes(self._kept) + note, newline=False).decode()


def run_phase(phase: Phase, job: Job, surroundings: Surroundings) -> PhaseResult:
    """Run one command until it ends, exceeds a limit, or its time is over; then end all that it left behind.

    Raises:
        IsProgram: in the child that is the program.
    """
    started = time.monotonic()
    command = start(phase, job, surroundings)
    drains = [Drain(descriptor, job.limits.output_bytes) for descriptor in command.outputs]
    if command.reason:
        os.close(command.stdin)
        outcome, detail = _not_started(phase, job), command.reason
    else:
        given = binascii.a2b_base64(phase.stdin)
        outcome, detail = _attend(command.pid, phase, job, surroundings.caller, command.stdin, given, drains)
    if outcome != EXITED or time.monotonic() > started + POLL_SECONDS:
        with suppress(OSError):  # nobody waits any more
            os.write(surroundings.caller, PHASE_OVER)
    status = end_all(command.pid, job.confinement)
    for drain in drains:
        drain.read_rest()
        os.close(drain.descriptor)
    code = None if status is None or outcome == NOT_STARTED else os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - started
    return PhaseResult(phase.name, outcome, code, seconds, drains[0].text(), drains[1].text(), detail)


@dataclass(frozen=True)
class Command:
    """A command that was started.

    Attributes:
        stdin: where its input is written.
        outputs: where its stdout and stderr are read.
        reason: why it did not start; empty if it did.
    """

    pid: int
    stdin: int
    outputs: "tuple[int, int]"
    reason: str


def start(phase: Phase, job: Job, surroundings: Surroundings, further: "tuple[int, ...]" = ()) -> Command:
    """Start a command in its confinement.

    Args:
        phase: the command.
        job: where and within which limits.
        surroundings: what the guard holds open.
        further: descriptors that the command gets as 3 and so on; closed here.

    Raises:
        IsProgram: in the child that is the program.
    """
    child_stdin, stdin = os.pipe()
    stdout, child_stdout = os.pipe()
    stderr, child_stderr = os.pipe()
    failure, child_failure = os.pipe()
    usual = os.pread(surroundings.hardness, 16, 0)
    os.pwrite(surroundings.hardness, b"1000", 0)  # if memory runs out the program goes, not the guard
    pid = os.fork()
    if pid == 0:
        _become(phase, job, (child_stdin, child_stdout, child_stderr, *further), child_failure)
    os.pwrite(surroundings.hardness, usual, 0)
    for descriptor in (child_stdin, child_stdout, child_stderr, *further, child_failure):
        os.close(descriptor)
    reason = os.read(failure, 1000).decode(errors="replace")  # at once: the program's start closes the other end
    os.close(failure)
    return Command(pid, stdin, (stdout, stderr), reason)


def _not_started(phase: Phase, job: Job) -> str:
    """Tell whose fault it is: what lies in the working directory was made by the program, and has to be there."""
    return OVER_LIMIT if phase.argv[0].startswith(f"{job.directory}/") else NOT_STARTED


def _become(phase: Phase, job: Job, streams: "Sequence[int]", failure: int) -> None:
    """Turn the forked child into the command; does not return.

    Raises:
        IsProgram: the command is this very interpreter.
    """
    try:
        os.setsid()
        *streams, failure = [_at_least(len(streams) + 1, descriptor) for descriptor in (*streams, failure)]
        for target, descriptor in enumerate(streams):
            os.dup2(descriptor, target, inheritable=target < len(STANDARD))
        failure = os.dup2(failure, len(streams), inheritable=False)
        os.closerange(failure + 1, MOST_DESCRIPTORS)  # nothing of the guard or the fork server stays open
        os.chdir(job.directory)
        os.umask(0o077)
        os.nice(NICENESS)  # where no control group weighs it, it is at least less than what the fleet does
        others = len(_processes_of_uid()) if job.confinement.kill_scope == KILL_DESCENDANTS else OWN_PROCESSES
        _confine(phase, job, processes=job.limits.processes + others)
        if list(phase.argv) == getattr(sys, "orig_argv", None):
            os.close(failure)
            raise IsProgram(job.is_session)
        # Python ignores these two, and what is ignored stays so through exec.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        os.execve(phase.argv[0], list(phase.argv), dict(job.environment))  # noqa: S606  no shell is the point
    except IsProgram:
        raise
    except BaseException as error:  # whatever it is, the parent reports it and this copy of the guard must end
        os.write(failure, f"{type(error).__name__}: {error}".encode()[:1000])
        os._exit(127)


def _at_least(bound: int, descriptor: int) -> int:
    """Make a descriptor that none of the first ones is put on; those in between are closed with the rest."""
    while descriptor < bound:
        descriptor = os.dup(descriptor)
    return descriptor


def _confine(phase: Phase, job: Job, *, processes: int) -> None:
    confinement = job.confinement
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # the guard is not, and its copy's own files in /proc would be root's
    apply_rlimits(
        job.limits,
        cpu_seconds=phase.timeout_seconds + 1,
        limits_address_space=phase.limits_address_space,
        processes=processes,
    )
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if confinement.readable is not None:
        landlock.restrict(confinement.readable, confinement.writable)
    if confinement.has_seccomp:
        denies_metadata = confinement.denies_metadata and not phase.is_tool
        seccomp.filter_for(MACHINE, denies_metadata).install()


def _processes_of_uid() -> "list[int]":
    """List the threads of this uid: where it is shared, RLIMIT_NPROC counts them all."""
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208
        with suppress(OSError):
            if name.isdigit() and os.lstat(f"/proc/{name}").st_uid == os.getuid():
                found += [int(thread) for thread in os.listdir(f"/proc/{name}/task")]  # noqa: PTH208
    return found


def _attend(
    pid: int, phase: Phase, job: Job, caller: int, stdin: int, given: bytes, drains: "list[Drain]"
) -> "tuple[str, str]":
    """Feed, drain and watch the command until it ends by itself or has to be ended; closes ``stdin``."""
    started, before, blockage = time.monotonic(), Baseline.of({}), Blockage()
    deadline = started + phase.timeout_seconds
    due = started + POLL_SECONDS
    unsent = memoryview(given)
    open_drains = {drain.descriptor: drain for drain in drains}
    poll = select.poll()
    for descriptor in (*open_drains, caller):
        poll.register(descriptor, select.POLLIN)
    if given:
        os.set_blocking(stdin, False)
        poll.register(stdin, select.POLLOUT)
    else:
        os.close(stdin)
        stdin = -1
    ending = _open_pidfd(pid)
    if ending is not None:
        poll.register(ending, select.POLLIN)
    try:
        while True:
            now = time.monotonic()
            if has_ended(pid):
                return EXITED, ""
            if now >= deadline:
                tree = descendants(os.getpid())
                verdict = time_verdict(tree, now - started, phase.timeout_seconds, before, blockage.seconds)
                if verdict is not None:
                    return verdict, why_ended(verdict, phase.timeout_seconds)
                deadline = now + POLL_SECONDS
            if now >= due:
                work = time.process_time()
                blockage.look(descendants(os.getpid()), now)
                counts_held = job.confinement.counts_held
                excess = find_excess(os.getpid(), job.directory, job.limits, counts_held=counts_held)
                if excess is not None:
                    return OVER_LIMIT, excess
                due = next_look(work)
            for descriptor, _ in poll.poll(1000 * max(0.0, min(due, deadline) - time.monotonic())):
                if descriptor == caller:
                    return OVER_LIMIT, "nobody waits for the answer any more"
                if descriptor in open_drains and not open_drains[descriptor].read():
                    poll.unregister(descriptor)
                    del open_drains[descriptor]
                elif descriptor == stdin:
                    unsent = feed(stdin, unsent)
                    if not unsent:
                        poll.unregister(stdin)
                        os.close(stdin)
                        stdin = -1
    finally:
        if stdin >= 0:
            os.close(stdin)
        if ending is not None:
            os.close(ending)


def why_ended(verdict: str, limit_seconds: float) -> str:
    """Tell why the time of a command was over."""
    if verdict == STARVED:
        return f"the machine was too busy to give it {limit_seconds:g} s within {longest_seconds(limit_seconds):g} s"
    return f"time limit exceeded: {limit_seconds:g} s"


def feed(descriptor: int, unsent: memoryview) -> memoryview:
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


def has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def end_all(main: int, confinement: Confinement) -> "int | None":
    """Kill and reap every process below the guard.

    Returns:
        The wait status of ``main``.

    Raises:
        TimeoutError: some could not be ended.
    """
    deadline = time.monotonic() + KILL_SECONDS
    main_status = None
    while True:
        signal_all(confinement, signal.SIGKILL)
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


def signal_all(confinement: Confinement, number: signal.Signals) -> None:
    """Signal every process below the guard."""
    if confinement.kill_scope == KILL_DESCENDANTS:
        for pid in descendants(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return
    # To all processes that this one may signal, except itself: those of its namespace, or of its uid. The kernel does
    # it in one go, which no fork can outrun.
    with suppress(ProcessLookupError):
        os.kill(-1, number)
