"""The guard's hold on one run: the processes that it has, and the directory where it works."""

import json
import os
import select
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field

from flotilla.services.sandbox.guard.agent import OF_ALL, REAPED, SIGNALLED
from flotilla.services.sandbox.guard.job import (
    ENDED,
    FORKING,
    GONE,
    KILL_DESCENDANTS,
    KILL_UID,
    Job,
    Orders,
    Phase,
)
from flotilla.services.sandbox.guard.program import FAILED, MADE
from flotilla.services.sandbox.guard.watch import ProcessStatus, descendants

MESSAGE_BYTES = 4096
KILL_SECONDS = 20.0
AGAIN_SECONDS = 0.05
NEW = b"n"
"""What the guard asks of the fork server: a new place."""


@dataclass(frozen=True)
class Command:
    """A command that was started.

    Attributes:
        stdin: where its input is written.
        outputs: where its stdout and stderr are read.
        reason: why it could not be ordered; empty if it was.
    """

    stdin: int
    outputs: "tuple[int, int]"
    reason: str


@dataclass
class Place:
    """Where one run continues.

    Attributes:
        roots: the first of a process namespace, or else the fork server: orphans are below it; and the process that
            becomes the program, or is its agent.
        first: stream for the end of the run.
        program: stream of the process that becomes the program, or is its agent.
        directory: where the program works, as the guard reaches it.
        kept: descriptors that keep the directory, and the mounts around it.
        status: wait status of the last command that has ended.
        reason: why a command that has ended did not start; empty if it did.
        reaped_seconds: processor time of orphans that were reaped.
    """

    orders: Orders
    roots: "tuple[int, int]"
    first: socket.socket
    program: socket.socket
    directory: str
    kept: "tuple[int, ...]"
    status: "int | None" = None
    reason: str = ""
    reaped_seconds: float = 0.0
    _has_agent: bool = field(default=False, init=False)
    _is_gone: bool = field(default=False, init=False)
    _num_answers: int = field(default=0, init=False)

    def start(self, phase: Phase, job: Job, further: "tuple[int, ...]" = (), *, is_last: bool = True) -> Command:
        """Start a command in its confinement.

        Args:
            phase: the command.
            job: within which limits.
            further: descriptors that the command gets as 3 and so on; closed here.
            is_last: no other command of the job follows.
        """
        child_stdin, stdin = os.pipe()
        stdout, child_stdout = os.pipe()
        stderr, child_stderr = os.pipe()
        streams = (child_stdin, child_stdout, child_stderr, *further)
        described = {name: value for name, value in vars(phase).items() if name != "stdin"}
        limits = None if job.limits == self.orders.limits else vars(job.limits)
        is_interpreter = list(phase.argv) == sys.orig_argv
        self._has_agent = self._has_agent or job.is_session or not is_last or not is_interpreter
        order = json.dumps([described, limits, job.is_session, self._has_agent]).encode()
        self.status, reason = None, ""
        try:
            socket.send_fds(self.program, [order], streams)
        except OSError as error:
            reason = f"{type(error).__name__}: {error}"
        for descriptor in streams:
            os.close(descriptor)
        return Command(stdin, (stdout, stderr), reason)

    @property
    def ending(self) -> socket.socket:
        """The stream that can be read when the command has ended."""
        return self.program if self._has_agent else self.first

    def has_ended(self) -> bool:
        """Check whether the command has ended; then ``status`` is its status, and ``reason`` why it did not start."""
        while self.status is None and _can_be_read(self.ending, 0.0):
            self._read(self.ending)
        if self.status is not None and not self._has_agent and _can_be_read(self.program, 0.0):
            self._read(self.program)  # the program's start has closed the other end, unless it failed
        return self.status is not None

    def tree(self) -> "dict[int, ProcessStatus]":
        """Measure the processes of the program."""
        found = descendants(*self.roots)
        found.pop(os.getpid(), None)
        if self._has_agent:
            found.pop(self.roots[1], None)
        return found

    def signal(self, number: int) -> None:
        """Signal every process of the program; an agent is needed for it but where the program has a uid of its own.

        Raises:
            TimeoutError: the agent does not answer.
        """
        if self.orders.confinement.kill_scope == KILL_UID:
            # To all processes of this uid, except this one. The kernel does it in one go, which no fork can outrun.
            with suppress(ProcessLookupError):
                os.kill(-1, number)
        else:
            self._ask(bytes([number, OF_ALL]), SIGNALLED)

    def interrupt(self) -> None:
        """Interrupt the command of an agent.

        Raises:
            TimeoutError: the agent does not answer.
        """
        self._ask(bytes([signal.SIGINT, 0]), SIGNALLED)

    def reap(self) -> None:
        """Have the agent reap orphans that have ended, and bring ``reaped_seconds`` up to date.

        Raises:
            TimeoutError: the agent does not answer.
        """
        self._ask(bytes([0, OF_ALL]), REAPED)

    def end(self) -> "int | None":
        """Kill every process of the run and wait until all have ended.

        Returns:
            The wait status of the program.

        Raises:
            TimeoutError: some could not be ended.
        """
        deadline = time.monotonic() + KILL_SECONDS
        while not self._is_gone:
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes did not end within {KILL_SECONDS:g} s of SIGKILL")
            self._kill()
            if _can_be_read(self.first, AGAIN_SECONDS):
                self._read(self.first)
        return self.status

    def close(self) -> None:
        """Release the run."""
        self.first.close()
        self.program.close()
        for descriptor in self.kept:
            os.close(descriptor)

    def _kill(self) -> None:
        if self._has_agent:
            with suppress(OSError):
                self.program.shutdown(socket.SHUT_RDWR)  # the agent ends
        scope = self.orders.confinement.kill_scope
        if scope == KILL_UID:
            self.signal(signal.SIGKILL)
        else:
            # Of a namespace the first process: with that one the kernel ends all others.
            for pid in self.tree() if scope == KILL_DESCENDANTS else self.roots[:1]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _ask(self, message: bytes, answer: bytes) -> None:
        before = self._num_answers
        deadline = time.monotonic() + KILL_SECONDS
        with suppress(OSError):
            self.program.send(message)
        while self._num_answers == before and self.status is None:
            if not _can_be_read(self.program, max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"the agent of a run did not answer within {KILL_SECONDS:g} s")
            self._read(self.program, answer)

    def _read(self, stream: socket.socket, answer: bytes = b"") -> None:
        """Read the messages about the run; their sender may have been killed."""
        try:
            message = stream.recv(MESSAGE_BYTES)
        except OSError:
            message = b""
        kind, content = message[:1], message[1:]
        if kind == ENDED and stream is self.ending:
            (self.status,) = struct.unpack("=i", content)
        elif kind == FAILED:
            self.reason = content.decode(errors="replace")
        elif kind == REAPED:
            (self.reaped_seconds,) = struct.unpack("=d", content)
        elif kind in (b"", GONE):
            self._is_gone = self._is_gone or stream is self.first
            if self.status is None:
                (self.status,) = struct.unpack("=i", content) if content else (int(signal.SIGKILL),)
        self._num_answers += bool(answer) and kind == answer


@dataclass(frozen=True)
class Request:
    """A place that the fork server has been asked for.

    Attributes:
        first, program: see ``Place``.
    """

    first: socket.socket
    program: socket.socket


def request(link: socket.socket) -> "Request | Exception":
    """Ask the fork server for a place, and wait until it forks: no program runs before.

    Returns:
        Why there is none, if there is none.
    """
    link.send(NEW)
    message, streams, _, _ = socket.recv_fds(link, MESSAGE_BYTES, 2)
    if message != FORKING:
        return OSError(message.decode(errors="replace") or "the fork server is gone")
    first, program = (socket.socket(fileno=stream) for stream in streams)
    return Request(first, program)


def take(link: socket.socket, requested: "Request | Exception", orders: Orders) -> Place:
    """Take a place that was requested.

    Raises:
        OSError: it could not be made.
    """
    if isinstance(requested, Exception):
        raise requested
    message = link.recv(MESSAGE_BYTES).decode(errors="replace")
    numbers = message.split()
    try:
        if not (len(numbers) == 2 and all(number.isdigit() for number in numbers)):
            raise OSError(message or "the fork server is gone")
        said, kept, _, _ = socket.recv_fds(requested.program, MESSAGE_BYTES, 2)
        if said != MADE:
            raise OSError(said.removeprefix(FAILED).decode(errors="replace") or "it was killed while it was made")
    except OSError:
        requested.first.close()
        requested.program.close()
        raise
    directory = f"/proc/self/fd/{kept[0]}" if kept else orders.directory
    root, process = map(int, numbers)
    return Place(orders, (root, process), requested.first, requested.program, directory, tuple(kept))


def _can_be_read(stream: socket.socket, seconds: float) -> bool:
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    return bool(poll.poll(1000 * seconds))
