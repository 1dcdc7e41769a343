"""Who moves ranges of images to their callers: a process of low priority (``sending``), or the thread that asks.

The service keeps its lease and its other answers on threads of ordinary priority, and none of them touches a byte.
"""

import contextlib
import itertools
import logging
import os
import socket
import struct
import subprocess
import threading
import time
from concurrent.futures import Future
from io import FileIO
from typing import Protocol

from flotilla.shared.children.processes import python_module
from flotilla.shared.children.secret_variables import without_secrets
from flotilla.shared.weights.image.image import WeightImage
from flotilla.shared.weights.image.loopback import SEND_BUFFER_BYTES, is_loopback
from flotilla.shared.weights.pull.sending import ORDER, RESULT, SEND_BYTES, Priority

log = logging.getLogger(__name__)

RANGE_SECONDS = 600.0
"""Longer than any range takes, also to a caller that is slow: then the process is stuck, and is killed."""
KILL_SECONDS = 5.0
CROWDED_SECONDS = 60.0
"""For so long no idle core is looked for again."""


class RangeSender(Protocol):
    """Moves bytes of images."""

    def send(self, connection: socket.socket, image: WeightImage, span: range, silence_seconds: float) -> None:
        """Send a range; returns when it is sent.

        Args:
            connection: to the caller.
            image: locked against writers.
            span: of the image.
            silence_seconds: for how long the caller may take nothing.

        Raises:
            OSError: the caller is gone or took nothing, or whoever sent has ended.
        """

    def copy(self, target: FileIO, image: WeightImage) -> None:
        """Write a whole image to a file; returns when it is written. Errors as of ``send``."""

    def close(self) -> None:
        """Break off what is being sent, and send no more."""


class InlineSender:
    """Sends on the thread that asks."""

    def send(self, connection: socket.socket, image: WeightImage, span: range, silence_seconds: float) -> None:
        """See ``RangeSender.send``."""
        connection.settimeout(silence_seconds)
        image.send(connection, span)

    def copy(self, target: FileIO, image: WeightImage, rest: range | None = None) -> None:
        """See ``RangeSender.copy``; or write what is left of it, from where the file is."""
        with image.view as view:
            num = 0 if rest is None else rest.start
            while num < len(view):
                num += target.write(view[num : num + SEND_BYTES])

    def close(self) -> None:
        """Nothing is left: whoever asks ends the connections."""


class ProcessSender:
    """Sends through a process, which is started when it is first needed, and again when it has ended.

    It runs where a core is idle. Where none is, another one of low priority goes on with the range, and sends for a
    while: a rollout would otherwise wait for training to pause.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[Priority, _Running] = {}
        self._idle_again_at = 0.0
        self._is_closed = False

    @property
    def pids(self) -> dict[Priority, int]:
        """Of the processes that run."""
        with self._lock:
            return {each: running.process.pid for each, running in self._running.items() if not running.has_ended}

    def send(self, connection: socket.socket, image: WeightImage, span: range, silence_seconds: float) -> None:
        """See ``RangeSender.send``."""
        if is_local := is_loopback(connection):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        connection.settimeout(None)
        seconds, fraction = divmod(silence_seconds, 1)
        timeout = struct.pack("ll", int(seconds), int(fraction * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        if rest := self._move(connection.fileno(), image, span, is_local=is_local):
            InlineSender().send(connection, image, rest, silence_seconds)

    def copy(self, target: FileIO, image: WeightImage) -> None:
        """See ``RangeSender.copy``."""
        if rest := self._move(target.fileno(), image, range(image.image_bytes), is_local=False):
            target.seek(rest.start)
            InlineSender().copy(target, image, rest)

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            self._is_closed = True
            running, self._running = list(self._running.values()), {}
        for each in running:
            each.end()

    def _move(self, target: int, image: WeightImage, span: range, *, is_local: bool) -> range:
        """Move a range; gives what is left of it where no process can be started."""
        while span and (running := self._started()) is not None:
            try:
                num, is_crowded = running.order(target, image.fileno(), span, is_local=is_local).result(RANGE_SECONDS)
            except OSError:  # a time-out, too
                running.end()
                raise
            if is_crowded:
                self._idle_again_at = time.monotonic() + CROWDED_SECONDS
            elif num < len(span):
                raise ConnectionResetError(f"{num} of {len(span)} bytes were taken")
            span = span[num:]
        return span

    def _started(self) -> "_Running | None":
        """Return a process; None if none can be started."""
        with self._lock:
            if self._is_closed:
                raise ConnectionAbortedError("nothing is sent any more")
            priority = Priority.LOW if time.monotonic() < self._idle_again_at else Priority.IDLE
            running = self._running.get(priority)
            if running is None or running.has_ended:
                try:
                    running = self._running[priority] = _Running(priority)
                except OSError as error:
                    # Too many processes, no memory for one more: it goes on with what there is.
                    log.warning("no process can be started to send weights", extra={"cause": repr(error)})
                    return None
            return running


class _Running:
    """The process, and who waits for it."""

    def __init__(self, priority: Priority) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self.process = subprocess.Popen(
                    python_module("flotilla.shared.weights.pull.sending", str(theirs.fileno()), priority),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=without_secrets(os.environ),
                )
            except BaseException:
                self._control.close()
                raise
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[tuple[int, bool]]] = {}
        self.has_ended = False
        """Whether nothing can be ordered any more."""
        threading.Thread(target=self._hear, name="weights sender", daemon=True).start()

    def order(self, target: int, image: int, span: range, *, is_local: bool) -> "Future[tuple[int, bool]]":
        """Have a range sent; the result is what ``send_range`` returns, or the process has ended (``OSError``)."""
        sent: Future[tuple[int, bool]] = Future()
        with self._lock:
            if self.has_ended:
                raise ConnectionResetError("the sending process has ended")
            number = next(self._numbers)
            self._waiting[number] = sent
        try:
            socket.send_fds(self._control, [ORDER.pack(number, span.start, span.stop, is_local)], [target, image])
        except OSError:
            with self._lock:
                self._waiting.pop(number, None)
            raise
        return sent

    def end(self) -> None:
        """Kill the process; whoever waits hears of it."""
        self.has_ended = True
        self.process.kill()
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)

    def _hear(self) -> None:
        with self._control, contextlib.suppress(OSError):
            while message := self._control.recv(RESULT.size):
                number, num, is_crowded = RESULT.unpack(message)
                with self._lock:
                    sent = self._waiting.pop(number)
                sent.set_result((num, is_crowded))
        with self._lock:
            self.has_ended = True
            waiting, self._waiting = self._waiting, {}
        for sent in waiting.values():
            sent.set_exception(ConnectionResetError("the sending process has ended"))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(KILL_SECONDS)
