"""What a service knows of one member process: its answers, its end, and why."""

import asyncio
import os
import signal
import socket
import tempfile
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any, Self

from flotilla.shared.errors import DeadlineExceeded, FlotillaError, WeightTransferFailed
from flotilla.shared.weights.group.endpoint_protocol import FROM_MEMBER, Arrived, Command, Done, Failed, Joined, Opened
from flotilla.shared.weights.group.json_lines import Lines

_TAIL_BYTES = 4096


class MemberLink:
    """Futures for what a member will say. When it ends, all that are open fail with the cause.

    A member that fails says so and then ends, and its last words and its exit code arrive over different sockets: it
    counts as ended when both have been read.
    """

    def __init__(self, epoch: int, theirs: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self.epoch = epoch
        self.theirs = theirs
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the link)
        self.forked: asyncio.Future[int] = loop.create_future()
        self.opened: asyncio.Future[int] = loop.create_future()
        self.joined: asyncio.Future[None] = loop.create_future()
        self.exited: asyncio.Future[int] = loop.create_future()
        self._replies: deque[asyncio.Future[Done]] = deque()
        self._on_arrived: deque[Callable[[int], None] | None] = deque()
        self._failure: FlotillaError | None = None
        self._lines: Lines | None = None

    @classmethod
    async def open(cls, epoch: int) -> Self:
        """Make both ends of a member's socket; ``theirs`` and ``errors`` are for the process that will be forked."""
        ours, theirs = socket.socketpair()
        try:
            link = cls(epoch, theirs)
            link._lines = await Lines.open(ours, link._hear, link._settle_if_ended)
        except BaseException:
            ours.close()
            theirs.close()
            raise
        return link

    def command(self, command: Command, on_arrived: Callable[[int], None] | None = None) -> asyncio.Future[Done]:
        """Send a command.

        Args:
            command: carried out after those before it.
            on_arrived: called with the number of bytes that have been received, where the command asks for that.

        Raises:
            FlotillaError: the member has failed, as it did.
        """
        if self._failure is not None:
            raise self._failure
        assert self._lines is not None
        self._lines.send(command.line())
        reply: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self._replies.append(reply)
        self._on_arrived.append(on_arrived)
        return reply

    def note_exit(self, code: int) -> None:
        """Record, from the endpoint, that the process ended."""
        if not self.exited.done():
            self.exited.set_result(code)
        self._settle_if_ended()

    def fail(self, error: FlotillaError) -> None:
        """Let everything that waits for this member fail, and what is asked later too."""
        if self._failure is None:
            self._failure = error
        waiting: list[asyncio.Future[Any]] = [self.forked, self.opened, self.joined, *self._replies]
        for future in waiting:
            if not future.done():
                future.set_exception(self._failure)
                future.exception()  # retrieved, so asyncio does not warn

    @property
    def has_process(self) -> bool:
        """Whether the process was forked; it may have ended since."""
        return self.forked.done() and self.forked.exception() is None

    def kill_directly(self) -> None:
        """Kill the process without the endpoint's help, for when that does not answer."""
        if self.has_process and not self.exited.done():
            with suppress(ProcessLookupError):
                os.kill(self.forked.result(), signal.SIGKILL)

    def close(self) -> None:
        """Close this end; a member that still runs ends by itself when it sees that."""
        self.fail(WeightTransferFailed(f"epoch {self.epoch} was closed"))
        if self._lines is not None:
            self._lines.close()
        self.theirs.close()
        self.errors.close()

    def _hear(self, line: bytes) -> None:
        message = FROM_MEMBER.validate_json(line)
        if isinstance(message, Opened):
            self.opened.set_result(message.port)
        elif isinstance(message, Joined):
            self.joined.set_result(None)
        elif isinstance(message, Arrived):
            if (on_arrived := self._on_arrived[0]) is not None:
                on_arrived(message.num_bytes)
        elif isinstance(message, Done):
            self._on_arrived.popleft()
            self._replies.popleft().set_result(message)
        elif isinstance(message, Failed):
            kind = DeadlineExceeded if message.is_timeout else WeightTransferFailed
            self.fail(kind(f"weight group of epoch {self.epoch}: {message.detail}", epoch=self.epoch))

    def _settle_if_ended(self) -> None:
        assert self._lines is not None
        if self.exited.done() and self._lines.is_closed and self._failure is None:
            code = self.exited.result()
            detail = f"the member process of epoch {self.epoch} ended with {code}{last_words(self.errors)}"
            self.fail(WeightTransferFailed(detail, epoch=self.epoch, exit_code=code))


def last_words(errors: IO[bytes]) -> str:
    """Return the last line of a process's standard error, after a colon; nothing where there is none."""
    end = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, end - _TAIL_BYTES))
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return f": {lines[-1].strip()}" if lines else ""
