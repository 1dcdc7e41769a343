"""Bytes between processes of one host, through buffers so small that what is sent is still cached when it is taken."""

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator
from ipaddress import ip_address

SEND_BYTES = 1 << 20
SEND_BUFFER_BYTES = 512 << 10
RECEIVE_BUFFER_BYTES = 1 << 20
"""Larger ones, which a network between two hosts needs, halve the rate of a connection on loopback."""


def is_loopback(connection: socket.socket) -> bool:
    """Return whether the other side of a connection is on this host."""
    address = connection.getpeername()[0]
    return address == connection.getsockname()[0] or ip_address(address.partition("%")[0]).is_loopback


@contextlib.contextmanager
def on_half_of_the_cores(*, sends: bool) -> Iterator[None]:
    """Keep this thread to half of the cores that it may use, where there are several.

    Both ends of a connection wake each other so often that the kernel likes to have them on one core, where they take
    twice the time: the sender has the first half, the receivers the other.
    """
    allowed = os.sched_getaffinity(0)
    cores = sorted(allowed)
    half = cores[: len(cores) // 2] if sends else cores[len(cores) // 2 :]
    if half:
        _move_to(half)
    try:
        yield
    finally:
        if half:
            _move_to(allowed)


def _move_to(cores: Iterable[int]) -> None:
    # The cores of the process may have been changed meanwhile: then the kernel chooses.
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cores)


def send_on_loopback(connection: socket.socket, data: memoryview) -> None:
    """Send all of it.

    Raises:
        OSError: the other side is gone, or took nothing for as long as the connection's time-out.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    for start in range(0, len(data), SEND_BYTES):
        connection.sendall(data[start : start + SEND_BYTES])
