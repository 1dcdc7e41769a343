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

from shared.processes import python_module
from shared.secret_variables import without_secrets
from shared.weights.image import WeightImage
from shared.weights.loopback import SEND_BUFFER_BYTES, is_loopback
from shared.weights.sending import ORDER, RESULT, SEND_BYTES, Priority

log = logging.getLogger(__name__)

RANGE_SECONDS = 600.0
"""Longer than any range takes, also to a caller that is slow: then the process is stuck, and is killed."""
KILL_SECONDS = 5.0
ALLOWED_SECONDS = 0.2
SLOW_BYTES_PER_SECOND = 250e6
"""A range that takes longer found no idle core, or a slow network, where priority matters little."""
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

    def copy(self, target: FileIO, image: WeightImage) -> None:
        """See ``RangeSender.copy``."""
        with image.view as view:
            num = 0
            while num < len(view):
                num += target.write(view[num : num + SEND_BYTES])

    def close(self) -> None:
        """Nothing is left: whoever asks ends the connections."""


class ProcessSender:
    """Sends through a process, which is started when it is first needed, and again when it has ended.

    It runs where a core is idle. Where that is too slow, another one of low priority sends for a while: a rollout
    would otherwise wait for training to pause.
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
        if (running := self._started()) is None:
            InlineSender().send(connection, image, span, silence_seconds)
            return
        if is_loopback(connection):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        connection.settimeout(None)
        seconds, fraction = divmod(silence_seconds, 1)
        timeout = struct.pack("ll", int(seconds), int(fraction * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        self._move(running, connection.fileno(), image, span)

    def copy(self, target: FileIO, image: WeightImage) -> None:
        """See ``RangeSender.copy``."""
        if (running := self._started()) is None:
            InlineSender().copy(target, image)
            return
        self._move(running, target.fileno(), image, range(image.image_bytes))

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            self._is_closed = True
            running, self._running = list(self._running.values()), {}
        for each in running:
            each.end()

    def _move(self, running: "_Running", target: int, image: WeightImage, span: range) -> None:
        started = time.monotonic()
        try:
            num = running.order(target, image.fileno(), span).result(RANGE_SECONDS)
        except OSError:  # a time-out, too
            running.end()
            raise
        now = time.monotonic()
        if now - started > ALLOWED_SECONDS + len(span) / SLOW_BYTES_PER_SECOND:
            self._idle_again_at = now + CROWDED_SECONDS
        if num < len(span):
            raise ConnectionResetError(f"{num} of {len(span)} bytes were taken")

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
                    python_module("shared.weights.sending", str(theirs.fileno()), priority),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=without_secrets(os.environ),
                )
            except BaseException:
                self._control.close()
                raise
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[int]] = {}
        self.has_ended = False
        """Whether nothing can be ordered any more."""
        threading.Thread(target=self._hear, name="weights sender", daemon=True).start()

    def order(self, target: int, image: int, span: range) -> "Future[int]":
        """Have a range sent; the result tells how many bytes went, or that the process has ended (``OSError``)."""
        sent: Future[int] = Future()
        with self._lock:
            if self.has_ended:
                raise ConnectionResetError("the sending process has ended")
            number = next(self._numbers)
            self._waiting[number] = sent
        try:
            socket.send_fds(self._control, [ORDER.pack(number, span.start, span.stop)], [target, image])
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
                number, num = RESULT.unpack(message)
                with self._lock:
                    sent = self._waiting.pop(number)
                sent.set_result(num)
        with self._lock:
            self.has_ended = True
            waiting, self._waiting = self._waiting, {}
        for sent in waiting.values():
            sent.set_exception(ConnectionResetError("the sending process has ended"))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(KILL_SECONDS)
