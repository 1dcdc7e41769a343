"""Ports of servers that end and come back on the same one."""

import random
import socket
from pathlib import Path
from typing import Final

GIVEN_TO_ANYBODY: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST: Final = 10_000
ATTEMPTS: Final = 200


def lasting_port(host: str) -> int:
    """Find a free port for a server that may end and be started again on it.

    The system gives it to nobody who asks for just any port. A client that calls while the server is unavailable could
    otherwise be given the very port that it calls, reach itself, and keep the server from coming back.

    Raises:
        OSError: the host is no address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in random.sample(range(LOWEST, _end()), ATTEMPTS):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _end() -> int:
    """Where the ports begin that the system gives to anybody; of what is known of other systems, the lowest."""
    try:
        first = int(GIVEN_TO_ANYBODY.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        first = 32_768
    return max(first, LOWEST + ATTEMPTS)
