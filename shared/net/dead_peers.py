"""How soon the kernel gives a connection up whose other host is out of reach.

Without this a call that waits on a connection into a cut network waits for its own deadline, and once the network is
back for the next of the kernel's repetitions, which by then are ten and more seconds apart. A process that is stopped
or busy is not out of reach: its kernel answers.

That holds until its buffer is full: ``TCP_USER_TIMEOUT`` also ends a connection whose reader takes nothing for so long.
So only callers set it, which ask again. What a server sends may be read as slowly as its reader likes.
"""

import socket
from typing import Final

FIRST_PROBE_SECONDS: Final = 2
PROBE_SECONDS: Final = 1
GIVE_UP_SECONDS: Final = 6
TCP_OPTIONS: Final = {
    option: value
    for name, value in (
        ("TCP_KEEPIDLE", FIRST_PROBE_SECONDS),
        ("TCP_KEEPINTVL", PROBE_SECONDS),
        ("TCP_KEEPCNT", GIVE_UP_SECONDS - FIRST_PROBE_SECONDS),
        ("TCP_USER_TIMEOUT", 1000 * GIVE_UP_SECONDS),
    )
    if (option := getattr(socket, name, None)) is not None
}
"""By option of ``IPPROTO_TCP``, of callers; to be set beside ``SO_KEEPALIVE``. A system that lacks one goes without."""
SOCKET_OPTIONS: Final = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *((socket.IPPROTO_TCP, option, value) for option, value in TCP_OPTIONS.items()),
]
"""The same for clients that take level, option and value."""
LISTENER_OPTIONS: Final = [each for each in SOCKET_OPTIONS if each[1] != getattr(socket, "TCP_USER_TIMEOUT", None)]
"""Those of a listener, which its connections inherit."""
