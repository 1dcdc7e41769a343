"""Runs as a program between us and a server: nothing that the server starts outlives us, whichever is killed.

    ours --(pipe)--> keeper --> the server --> its children, and what those leave behind

The keeper is the reaper of everything below it (``PR_SET_CHILD_SUBREAPER``): what loses its parent comes to it,
whatever session or group it is in. It ends only when nothing is left. Its standard input is a pipe of which we have the
other end: at its end of file, which the kernel makes when we die, all is killed at once. SIGTERM ends the server in
peace, as does the end of its first process: the rest gets SIGTERM, too, and some seconds. Then it ends as that first
process did.

Python's resource trackers are left for a moment: they remove the shared memory of those who were killed, then end.

It imports only the standard library: it starts in a few milliseconds and needs no environment.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
CANNOT_START = 126
TRACKER = b"multiprocessing.resource_tracker"
TRACKER_SECONDS = 3.0
POLL_SECONDS = 0.2
"""Between two scans for processes started while others were killed."""


class Keeper:
    """The processes below this one, and what is to be done with them.

    Args:
        seconds: between SIGTERM and SIGKILL when the server ends by itself.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._server = 0
        self._status: int | None = None
        self._is_told = False
        self._is_alone = False
        self._kills_at: float | None = None
        self._ends_trackers_at: float | None = None
        self._woken, self._wakes = os.pipe()

    def listen(self) -> None:
        """Become the reaper, and be woken by signals."""
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        os.set_blocking(self._wakes, False)
        signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGTERM, self._on_term)
        # Ctrl-C is meant for the fleet, which ends us in order.
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def start(self, command: list[str]) -> None:
        """Start the server; the kernel ends it with this process.

        Raises:
            OSError: it cannot be started.
        """
        libc, keeper = ctypes.CDLL(None), os.getpid()

        def tie() -> None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            if os.getppid() != keeper:
                os._exit(1)

        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=tie)  # noqa: PLW1509  system calls alone
        self._server = process.pid
        # Reaped here with all others, not by its object.
        process.returncode = 0

    def run(self) -> int:
        """Reap children until none is left; return the server's wait status."""
        while self._reap():
            self._follow()
            watched = [self._woken] if self._is_alone else [self._woken, sys.stdin.fileno()]
            ready, _, _ = select.select(watched, [], [], self._patience())
            if self._woken in ready:
                os.read(self._woken, 4096)
            if sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 4096):
                self._is_alone = True
        return self._status or 0

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        self._is_told = True

    def _reap(self) -> bool:
        """Reap ended children; False if none is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._server:
                self._status = status

    def _follow(self) -> None:
        now = time.monotonic()
        if self._is_alone or (self._kills_at is not None and now >= self._kills_at):
            self._kill(now)
        elif self._kills_at is None and (self._is_told or self._status is not None):
            # The caller has a deadline of its own, at which it closes the pipe.
            self._kills_at = float("inf") if self._is_told else now + self._seconds
            for pid, command in descendants().items():
                if TRACKER not in command:
                    send(pid, signal.SIGTERM)

    def _kill(self, now: float) -> None:
        family = descendants()
        others = [pid for pid, command in family.items() if TRACKER not in command]
        for pid in others:
            send(pid, signal.SIGKILL)
        if others:
            self._ends_trackers_at = None
        elif self._ends_trackers_at is None:
            self._ends_trackers_at = now + TRACKER_SECONDS
        elif now >= self._ends_trackers_at:
            for pid in family:
                send(pid, signal.SIGKILL)

    def _patience(self) -> float | None:
        if self._is_alone:
            return POLL_SECONDS
        if self._kills_at is None or self._kills_at == float("inf"):
            return None
        return max(POLL_SECONDS, self._kills_at - time.monotonic())


def descendants() -> dict[int, bytes]:
    """Find the processes below this one that have not ended, with their command lines."""
    parents: dict[int, int] = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = (process / "stat").read_bytes().rpartition(b")")[2].split()[:2]
                if state != b"Z":
                    parents[int(process.name)] = int(parent)
    below: dict[int, bytes] = {}
    found = {os.getpid()}
    while found:
        found = {pid for pid, parent in parents.items() if parent in found}
        below |= {pid: command_of(pid) for pid in found}
    return below


def command_of(pid: int) -> bytes:
    """Read a command line; empty if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, unless it has ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def end_as(status: int) -> int:
    """End by the signal that ended another one, or return its exit code."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    return os.waitstatus_to_exitcode(status)


def main(arguments: list[str]) -> int:
    """Start ``arguments[1:]``, with ``arguments[0]`` seconds between SIGTERM and SIGKILL; see above."""
    keeper = Keeper(float(arguments[0]))
    keeper.listen()
    try:
        keeper.start(arguments[1:])
    except OSError as error:
        sys.stderr.write(f"{error.strerror}\n")
        return CANNOT_START
    return end_as(keeper.run())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
