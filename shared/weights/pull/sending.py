"""The process that sends ranges of images: it moves bytes for its service, at a low priority, and decides nothing.

Run with the number of a socket that it inherits, and with how it gives way (``Priority``). Each message there is one
range, with two descriptors: where it goes, and the image, whose lock lasts as long as the descriptor. The answer tells
how many bytes went, and whether it stopped there because no core is idle. It ends with its service, since that closes
the socket.

It is a process and no thread, since a thread that gives way to training may have to do so while it holds the
interpreter's lock: the loop that keeps the service's lease would then give way, too.
"""

import contextlib
import os
import socket
import struct
import sys
import threading
import time
from enum import StrEnum
from pathlib import Path

from flotilla.shared.weights.image.loopback import on_half_of_the_cores

ORDER = struct.Struct("<QQQ?")
"""Number, first byte, the byte after the last, and whether it goes to this host."""
RESULT = struct.Struct("<QQ?")
"""Number, how many bytes were sent, and whether the rest is for a process of another priority."""
NICENESS = 15
"""Against training that uses every core, the sender gets some 3 % of one: little, but never nothing."""
SEND_BYTES = 8 << 20
FIRST_BYTES = 1 << 20
"""Of a range; then it is seen how long a core was waited for."""
ON_HALF_SECONDS = 0.02
"""Who has waited so long for one of half of the cores takes any."""
ALLOWED_SECONDS = 0.2
ALLOWED_BYTES_PER_SECOND = 500e6
"""Who waits longer for an idle core than at this rate finds none: the rest is sent at a low priority."""

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


def _serve(control: socket.socket, message: bytes, descriptors: list[int], priority: Priority) -> None:
    number, start, stop, is_local = ORDER.unpack(message)
    target, image = descriptors
    num, is_crowded = 0, False
    try:
        needs_idle_core = priority is Priority.IDLE
        span = range(start, stop)
        num, is_crowded = send_range(target, image, span, needs_idle_core=needs_idle_core, is_local=is_local)
    finally:
        for each in descriptors:
            os.close(each)
        with contextlib.suppress(OSError):
            control.send(RESULT.pack(number, num, is_crowded))


def main(descriptor: int, priority: Priority) -> None:
    """Send what is ordered until the service closes its end."""
    os.nice(NICENESS)
    if priority is Priority.IDLE:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    control = socket.socket(fileno=descriptor)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, ORDER.size, 2)
        if len(message) != ORDER.size or len(descriptors) != 2:
            # At once: what is on its way has nobody who would count it.
            os._exit(0)
        order = (control, message, list(descriptors), priority)
        threading.Thread(target=_serve, args=order, daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]), Priority(sys.argv[2]))
