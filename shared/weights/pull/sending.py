"""The process that sends ranges of images: it moves bytes for its service, at a low priority, and decides nothing.

It receives its ``Priority``, and answers with the address of a socket. There each call sends two
descriptors ahead: where its range goes, and the image, whose lock lasts as long as the descriptor. The answer tells how
many bytes went, and whether it stopped there because no core is idle.

It is a process and no thread, since a thread that gives way to training may have to do so while it holds the
interpreter's lock: the loop that keeps the service's lease would then give way, too.
"""

import asyncio
import contextlib
import os
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path

from flotilla.shared.children.serving import serve
from flotilla.shared.errors import Unavailable
from flotilla.shared.weights.image.loopback import on_half_of_the_cores

MAX_RANGES = 10_000
"""At a time; each has a thread."""
CREDENTIALS = struct.Struct("3i")
"""Of the peer of a unix socket: process, user, group."""
NICENESS = 15
"""Against training that uses every core, the sender gets some 3 % of one: little, but never nothing."""
SEND_BYTES = 8 << 20
FIRST_BYTES = 1 << 20
"""Of a range; then it is seen how long a core was waited for."""
ON_HALF_SECONDS = 0.02
"""After waiting so long for one of half of the cores it takes any."""
ALLOWED_SECONDS = 0.2
ALLOWED_BYTES_PER_SECOND = 500e6
"""Below this rate no idle core is assumed to be free: the rest is sent at a low priority."""

SCHEDULING = Path("/proc/thread-self/schedstat")
"""Of Linux: nanoseconds on a core, nanoseconds of waiting for one, how often."""


class Priority(StrEnum):
    """How the process gives way to others."""

    IDLE = "idle"
    """It runs where a core has nothing else to do; where none is idle it gets some 0.3 % of one."""
    LOW = "low"
    """See ``NICENESS``."""


def send_range(
    target: int, image: int, span: range, *, needs_idle_core: bool = False, is_local: bool = False
) -> tuple[int, bool]:
    """Have the kernel move bytes of a file to a socket or a file, until the other side is gone.

    Args:
        target: descriptor that blocks; a socket with a time-out of its own (``SO_SNDTIMEO``).
        image: descriptor of the file.
        span: of the file.
        needs_idle_core: whether to stop where none is idle.
        is_local: whether it goes to this host: then from half of the cores, unless these are not idle.

    Returns:
        How many bytes went, and whether it stopped since no core is idle.
    """
    position, waited_before = span.start, _waited_seconds()
    # Gone, or it took nothing for too long.
    with contextlib.suppress(OSError), contextlib.ExitStack() as on_half:
        if is_local:
            on_half.enter_context(on_half_of_the_cores(sends=True))
        while position < span.stop:
            most = SEND_BYTES if position > span.start else FIRST_BYTES
            num = os.sendfile(target, image, position, min(span.stop - position, most))
            if num == 0:
                break
            position += num
            waited = _waited_seconds() - waited_before
            if waited > ON_HALF_SECONDS:
                on_half.close()
            if needs_idle_core and waited > ALLOWED_SECONDS + (position - span.start) / ALLOWED_BYTES_PER_SECOND:
                return position - span.start, True
    return position - span.start, False


def _waited_seconds() -> float:
    """Return how long this thread has waited for a core; where the system does not count it, what time it is."""
    try:
        on_core, waiting, _ = map(int, SCHEDULING.read_text().split())
    except OSError:
        on_core = waiting = 0
    # All are zero where the kernel was built or started without these counts.
    return waiting / 1e9 if on_core else time.monotonic()


class Sender:
    """Sends what calls ask for, each on a thread.

    Args:
        priority: how it gives way.

    Attributes:
        about: the address of the socket for descriptors.
    """

    def __init__(self, priority: str) -> None:
        os.nice(NICENESS)
        self._needs_idle_core = priority == Priority.IDLE
        if self._needs_idle_core:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        self._threads = ThreadPoolExecutor(MAX_RANGES)
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.bind("")  # Linux chooses a name, of no file
        self._listening.listen()
        self.about = self._listening.getsockname().decode("ascii")
        self._control: socket.socket | None = None

    async def handle(self, content: tuple[int, int, bool]) -> tuple[int, bool]:
        """Send the bytes from one up to another, to this host or not; returns what ``send_range`` does.

        Raises:
            Unavailable: this process cannot have two more descriptors now.
        """
        control = self._control = self._control or self._owners()
        # It does not wait: they were sent before the call was.
        _, descriptors, _, _ = socket.recv_fds(control, 1, 2)
        if len(descriptors) != 2:
            for each in descriptors:
                os.close(each)
            raise Unavailable(f"what sends weights got {len(descriptors)} of 2 descriptors")
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._send, descriptors, *content)

    def _owners(self) -> socket.socket:
        while True:
            control, _ = self._listening.accept()
            peer = control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
            if CREDENTIALS.unpack(peer)[0] == os.getppid():
                return control
            control.close()

    def _send(self, descriptors: list[int], start: int, stop: int, is_local: bool) -> tuple[int, bool]:
        target, image = descriptors
        try:
            return send_range(
                target, image, range(start, stop), needs_idle_core=self._needs_idle_core, is_local=is_local
            )
        finally:
            os.close(target)
            os.close(image)


if __name__ == "__main__":
    serve(Sender)
    # At once: what is in flight would not be counted.
    os._exit(0)
