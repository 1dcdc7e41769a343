"""Bytes between processes of one host, through buffers so small that what is sent is still cached when it is taken."""

import socket
from ipaddress import ip_address

SEND_BYTES = 1 << 20
SEND_BUFFER_BYTES = 512 << 10
RECEIVE_BUFFER_BYTES = 1 << 20
"""Larger ones, which a network between two hosts needs, halve the rate of a connection on loopback."""


def is_loopback(connection: socket.socket) -> bool:
    """Tell whether the other side of a connection is on this host."""
    address = connection.getpeername()[0]
    return address == connection.getsockname()[0] or ip_address(address.partition("%")[0]).is_loopback


def send_on_loopback(connection: socket.socket, data: memoryview) -> None:
    """Send all of it.

    Raises:
        OSError: the other side is gone, or took nothing for as long as the connection's time-out.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    for start in range(0, len(data), SEND_BYTES):
        connection.sendall(data[start : start + SEND_BYTES])
