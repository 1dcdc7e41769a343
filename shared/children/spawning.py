"""Starts child processes: without the fleet's secrets, in a group of their own, with their last words kept.

A process that has imported what they need can fork them in milliseconds, where a fresh one takes seconds. It must have
no other threads, and an event loop. Each child has a socket, on which it writes lines and reads what it is told; all of
them end with the process that forked them.
"""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import subprocess
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context
from typing import NoReturn

from flotilla.shared.children.processes import (
    POLL_SECONDS,
    READ_BYTES,
    LastWords,
    cause_of_death,
    die_with_parent,
    kill,
    reap,
    unheard,
)
from flotilla.shared.concurrency.cancelling import to_the_end
from flotilla.shared.environment.secret_variables import without_secrets
from flotilla.shared.host.control_groups import count_memory_kills

LAST_WORDS_SECONDS = 1.0
"""A grandchild may hold standard error open: no more is waited for than this."""


def output_of(command: Sequence[str], *, seconds: float) -> str:
    """Run a program that ends by itself, and return its standard output; blocks.

    Args:
        command: program and arguments.
        seconds: then it is killed.

    Raises:
        OSError: it cannot be started, took longer (``TimeoutError``), or failed, with its last lines.
    """
    try:
        done = subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            env=child_environment(),
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{command[0]} did not end within {seconds:g} s") from None
    if done.returncode:
        words = LastWords(unheard)
        words.hear(done.stderr)
        raise ChildProcessError(f"{command[0]} {cause_of_death(done.returncode)}{words.shown()}")
    return done.stdout.decode(errors="replace")


def child_environment(**changes: str) -> dict[str, str]:
    """Return this process's environment without secrets, with some changes."""
    return without_secrets(os.environ) | changes


class _Protocol(asyncio.subprocess.SubprocessStreamProtocol):
    """Reports the exit itself: ``Process.wait`` also waits for the pipes, which grandchildren may hold open."""

    def __init__(self, limit: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(limit, loop)
        self.exited = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.exited.set()


class Child:
    """A child process with pipes. Made by :func:`spawn`; it is ended by its owner.

    Args:
        process: with standard input, output and error as pipes.
        transport: of its pipes.
        exited: is set when the process has ended, even if its pipes are still held.
        words: gets what it writes to standard error.
        leads_session: whether its process group is its own.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        transport: asyncio.SubprocessTransport,
        exited: asyncio.Event,
        words: LastWords,
        *,
        leads_session: bool = True,
    ) -> None:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self.process, self.words = process, words
        self._transport, self._exited, self._leads_session = transport, exited, leads_session
        self.stdin, self.stdout = process.stdin, process.stdout
        self._memory_kills = count_memory_kills()
        self.is_killed_here = self._is_over = False
        self._hearing = asyncio.create_task(self._hear(process.stderr), name="last words")

    @property
    def has_ended(self) -> bool:
        """Whether there is no process any more."""
        return self.process.returncode is not None

    @property
    def exit_code(self) -> int | None:
        """Negative for the signal that ended it; None while it runs."""
        return self.process.returncode

    def cause(self) -> str:
        """Describe how it ended, with the last lines that it wrote; see ``cause_of_death``."""
        is_out_of_memory = count_memory_kills() > self._memory_kills
        how = cause_of_death(self.exit_code, is_out_of_memory=is_out_of_memory, is_killed_here=self.is_killed_here)
        return how + self.words.shown()

    def write(self, data: bytes) -> None:
        """Write to its standard input; nothing where that is closed, which its end tells: not every loop ignores it."""
        if not self.stdin.is_closing():
            self.stdin.write(data)

    async def ended(self) -> int:
        """Wait until it has ended by itself, and its last words are heard."""
        await self._exited.wait()
        await self._heard()
        assert self.exit_code is not None
        return self.exit_code

    async def end(self) -> int | None:
        """Kill it, and the processes of its group, and wait for its end; a child that has ended keeps its exit code."""
        if not self._is_over:
            # Once: the group outlives a child whose own children still run, but its number is given again later.
            self._is_over, self.is_killed_here = True, not self.has_ended
            if self._leads_session:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.process.pid, signal.SIGKILL)
            kill(self.process)
        code = await reap(self.process, exited=self._exited)
        await self._heard()
        self._transport.close()
        await asyncio.sleep(0)  # in which the pipes are closed
        return code

    async def _heard(self) -> None:
        await asyncio.wait([self._hearing], timeout=LAST_WORDS_SECONDS)
        self._hearing.cancel()
        await asyncio.gather(self._hearing, return_exceptions=True)

    async def _hear(self, errors: asyncio.StreamReader) -> None:
        while data := await errors.read(READ_BYTES):
            self.words.hear(data)


async def spawn(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    max_line_bytes: int,
    on_line: Callable[[str], None] | None = None,
    leads_session: bool = True,
    context: Context | None = None,
) -> Child:
    """Start a program with pipes.

    It is to ask for its parent-death signal itself (``processes.die_with_parent``), as ``serving`` does.

    Args:
        command: program and arguments.
        environment: all of its variables; None: ``child_environment()``.
        max_line_bytes: longest line of its standard output.
        on_line: see ``LastWords``.
        leads_session: whether it gets a session of its own, with all that it starts: a terminal's interrupt is its
            owner's to handle then, and all of the session ends with it.
        context: in which its standard error is heard; None: the caller's.

    Raises:
        OSError: it cannot be started.
    """
    loop = asyncio.get_running_loop()

    async def start() -> Child:
        # As ``create_subprocess_exec``, which keeps the transport to itself: a grandchild may hold the pipes open.
        transport, protocol = await loop.subprocess_exec(
            lambda: _Protocol(max_line_bytes, loop),
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=child_environment() if environment is None else environment,
            start_new_session=leads_session,
        )
        process = asyncio.subprocess.Process(transport, protocol, loop)
        return Child(process, transport, protocol.exited, LastWords(on_line), leads_session=leads_session)

    starting = asyncio.create_task(start(), name="spawning", context=context)
    try:
        # Not every loop ends a start whose caller is cancelled meanwhile.
        return await to_the_end(starting)
    except asyncio.CancelledError:
        if starting.done() and starting.exception() is None:
            await starting.result().end()
        raise


class Forked:
    """A child; it runs as soon as this is made.

    Args:
        run: what the child does with its end of the socket.
        on_line: called with each line that it writes there, without the line break.

    Attributes:
        pid: of the child.
        cause: becomes how it ended, with the last lines of its standard output and error; see ``cause_of_death``.
    """

    def __init__(self, run: Callable[[socket.socket], object], on_line: Callable[[bytes], None]) -> None:
        self._control, theirs = socket.socketpair()
        self._errors, their_errors = socket.socketpair()
        self._memory_kills, parent = count_memory_kills(), os.getpid()
        self._is_killed_here = self._has_ended = False
        self._words = LastWords(unheard)
        with theirs, their_errors:
            self.pid = os.fork()
            if self.pid == 0:
                _become(run, theirs, their_errors, parent)
        self._control.setblocking(False)
        self._errors.setblocking(False)
        self.cause = asyncio.create_task(self._keep(on_line), name="forked child")

    def tell(self, data: bytes) -> None:
        """Write to its socket without waiting: a child that does not read until it is full is stuck.

        Raises:
            OSError: the child has ended, or does not read.
        """
        self._control.send(data)

    def kill(self) -> None:
        """End it, whatever it is doing."""
        if not self._has_ended:
            self._is_killed_here = True
            os.kill(self.pid, signal.SIGKILL)

    async def _keep(self, on_line: Callable[[bytes], None]) -> str:
        hearing = asyncio.create_task(self._read(self._errors, self._words.hear))
        rest = b""

        def hear(data: bytes) -> None:
            nonlocal rest
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                on_line(line)

        await self._read(self._control, hear)
        # It has closed its socket, which it does by ending.
        while (status := self._reaped()) is None:  # noqa: ASYNC110 (only asking tells)
            await asyncio.sleep(POLL_SECONDS)
        await asyncio.wait([hearing], timeout=LAST_WORDS_SECONDS)
        hearing.cancel()
        self._control.close()
        self._errors.close()
        is_out_of_memory = count_memory_kills() > self._memory_kills
        code = os.waitstatus_to_exitcode(status)
        how = cause_of_death(code, is_out_of_memory=is_out_of_memory, is_killed_here=self._is_killed_here)
        return how + self._words.shown()

    def _reaped(self) -> int | None:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        self._has_ended = pid != 0
        return status if pid else None

    async def _read(self, connection: socket.socket, hear: Callable[[bytes], None]) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await asyncio.get_running_loop().sock_recv(connection, READ_BYTES):
                hear(data)


def _become(
    run: Callable[[socket.socket], object], control: socket.socket, errors: socket.socket, parent: int
) -> NoReturn:
    try:
        # What is the parent's must stay: closing it here would close what gets the same number meanwhile.
        gc.freeze()
        die_with_parent(parent, with_signal=signal.SIGKILL)
        for number in (1, 2):
            os.dup2(errors.fileno(), number)
        # Waiters for the end of another child, or of the parent, must see it.
        kept = os.dup2(control.detach(), 3)
        os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
        run(socket.socket(fileno=kept))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
