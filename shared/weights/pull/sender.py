"""Moves ranges of images to their callers: by a process of low priority (``sending``), or the calling thread.

The service keeps its lease and its other answers on threads of ordinary priority, and none of them touches a byte.
"""

import asyncio
import logging
import socket
import struct
import threading
import time
from concurrent.futures import Future
from functools import cache
from io import FileIO
from typing import Protocol

from flotilla.shared.children.calls import CallProcess
from flotilla.shared.children.processes import python_module
from flotilla.shared.errors import DeadlineExceeded, FlotillaError
from flotilla.shared.weights.image.image import WeightImage
from flotilla.shared.weights.image.loopback import SEND_BUFFER_BYTES, is_loopback
from flotilla.shared.weights.pull.sending import SEND_BYTES, Priority

log = logging.getLogger(__name__)

RANGE_SECONDS = 600.0
"""Longer than any range takes, also to a caller that is slow: then the process is stuck, and is killed."""
COMMAND = python_module("flotilla.shared.weights.pull.sending")
CROWDED_SECONDS = 60.0
"""For so long no idle core is searched for again."""


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
            OSError: the caller is gone or read nothing, or the sending process has ended.
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
        """See ``RangeSender.copy``; or write the rest of it, from the file's position."""
        with image.view as view:
            num = 0 if rest is None else rest.start
            while num < len(view):
                num += target.write(view[num : num + SEND_BYTES])

    def close(self) -> None:
        """Nothing to do: the caller ends the connections."""


class ProcessSender:
    """Sends through a process, which is started when it is first needed, and again when it has ended.

    It runs where a core is idle. Where none is, another one of low priority continues with the range, and sends for a
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
            return {each: pid for each, running in self._running.items() if (pid := running.pid) is not None}

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
        """Move a range; returns the rest of it where no process can be started."""
        while span and (running := self._started()) is not None:
            try:
                num, is_crowded = running.order(target, image.fileno(), span, is_local=is_local).result()
            except DeadlineExceeded as error:
                running.end()
                raise TimeoutError(error.detail) from None
            except FlotillaError as error:
                raise ConnectionResetError(error.detail) from None
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
            if running is not None and running.pid is None:
                running.end()
                running = None
            if running is None:
                try:
                    running = self._running[priority] = _Running(priority)
                except (FlotillaError, OSError) as error:
                    # Too many processes, no memory for one more: it continues with what there is.
                    log.warning("no process can be started to send weights", extra={"cause": repr(error)})
                    return None
            return running


class _Running:
    """One process. Errors of starting it are those of ``CallProcess.start``, and ``OSError``."""

    def __init__(self, priority: Priority) -> None:
        self._process = CallProcess(COMMAND, priority, "what sends weights", blames_opening=False)
        self._control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        try:
            self._control.connect(asyncio.run_coroutine_threadsafe(self._process.start(), _loop()).result())
        except BaseException:
            self.end()
            raise

    @property
    def pid(self) -> int | None:
        """Of the process; None where nothing can be ordered any more."""
        child = self._process.child
        return None if child is None or child.has_ended else child.process.pid

    def order(self, target: int, image: int, span: range, *, is_local: bool) -> "Future[tuple[int, bool]]":
        """Have a range sent; the result is what ``send_range`` returns. Errors are those of ``CallProcess.call``."""
        content = [span.start, span.stop, is_local]
        with self._lock:  # so that descriptors arrive in the order of the calls
            socket.send_fds(self._control, [b"\0"], [target, image])
            return asyncio.run_coroutine_threadsafe(self._process.call(content, seconds=RANGE_SECONDS), _loop())

    def end(self) -> None:
        """Kill the process; waiters see its end."""
        asyncio.run_coroutine_threadsafe(self._process.aclose(), _loop()).result()
        self._control.close()


_LOOP_LOCK = threading.Lock()


def _loop() -> asyncio.AbstractEventLoop:
    """Run an event loop on a thread of its own, which lives as long as this process: children end with their thread."""
    with _LOOP_LOCK:  # a cache calls once for each thread that asks meanwhile
        return _only_loop()


@cache
def _only_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="weights senders", daemon=True).start()
    return loop
