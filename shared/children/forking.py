"""Children that a process forks, which has imported what they need: in milliseconds, where a fresh one takes seconds.

The process that forks must have no other threads, and an event loop. Each child has a socket, on which it writes lines
and reads what it is told; all of them end with the process that forked them.
"""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import traceback
from collections.abc import Callable
from typing import NoReturn

from flotilla.shared.children.processes import (
    POLL_SECONDS,
    READ_BYTES,
    LastWords,
    cause_of_death,
    die_with_parent,
    unheard,
)
from flotilla.shared.host.control_groups import count_memory_kills

LAST_WORDS_SECONDS = 1.0


class Forked:
    """A child; it runs as soon as this is made.

    Args:
        run: what the child does with its end of the socket.
        on_line: told each line that it writes there, without the end of line.

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
        """Write to its socket, at once or not at all: who does not read for so long that it is full is stuck.

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
        # Whoever waits for the end of another child, or of the parent, must see it.
        kept = os.dup2(control.detach(), 3)
        os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
        run(socket.socket(fileno=kept))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
