"""The process that sends ranges of images: it moves bytes for its service, at a low priority, and decides nothing.

Run with the number of a socket that it inherits, and with how it gives way (``Priority``). Each message there is one
range, with two descriptors: where it goes, and the image, whose lock lasts as long as the descriptor. The answer tells
how many bytes went. It ends with its service, since that closes the socket.

It is a process and no thread, since a thread that gives way to training may have to do so while it holds the
interpreter's lock: the loop that keeps the service's lease would then give way, too.
"""

import contextlib
import os
import socket
import struct
import sys
import threading
from enum import StrEnum

ORDER = struct.Struct("<QQQ")
"""Number, first byte, and the byte after the last."""
RESULT = struct.Struct("<QQ")
"""Number, and how many bytes were sent."""
NICENESS = 15
"""Against training that uses every core, the sender gets some 3 % of one: little, but never nothing."""
SEND_BYTES = 8 << 20


class Priority(StrEnum):
    """How the process gives way to others."""

    IDLE = "idle"
    """It runs where a core has nothing else to do; where none is idle it gets some 0.3 % of one."""
    LOW = "low"
    """See ``NICENESS``."""


def send_range(target: int, image: int, span: range) -> int:
    """Have the kernel move bytes of a file to a socket or a file; gives how many went before the other side was gone.

    Args:
        target: descriptor that blocks; a socket with a time-out of its own (``SO_SNDTIMEO``).
        image: descriptor of the file.
        span: of the file.
    """
    position = span.start
    with contextlib.suppress(OSError):  # gone, or it took nothing for too long
        while position < span.stop:
            num = os.sendfile(target, image, position, min(span.stop - position, SEND_BYTES))
            if num == 0:
                break
            position += num
    return position - span.start


def _serve(control: socket.socket, number: int, descriptors: list[int], span: range) -> None:
    target, image = descriptors
    num = 0
    try:
        num = send_range(target, image, span)
    finally:
        for each in descriptors:
            os.close(each)
        with contextlib.suppress(OSError):
            control.send(RESULT.pack(number, num))


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
        number, start, stop = ORDER.unpack(message)
        order = (control, number, list(descriptors), range(start, stop))
        threading.Thread(target=_serve, args=order, daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]), Priority(sys.argv[2]))
