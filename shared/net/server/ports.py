"""Addresses that servers can be told to others by, and ports of those that end and come back on the same one."""

import random
import socket
from ipaddress import ip_address
from pathlib import Path
from typing import Final

import psutil

from flotilla.shared.errors import InvalidRequest

GIVEN_TO_ANYBODY: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST: Final = 10_000
ATTEMPTS: Final = 200
WILDCARDS: Final = frozenset({"0.0.0.0", "::"})  # noqa: S104 (named here to be refused, or to be asked about)
"""Wildcard addresses: valid to listen on, not reachable from other machines."""


def check_can_be_told(bound: socket.socket, said: str) -> None:
    """Check that what a socket is bound to is one address: others are told it, and are to reach it there.

    Args:
        bound: before or while it listens.
        said: what the host came from and what it says, such as ``--host 0.0.0.0``.

    Raises:
        InvalidRequest: it is bound to all addresses of this machine; the detail lists them.
    """
    if bound.getsockname()[0] in WILDCARDS:
        raise InvalidRequest(
            f"{said} stands for all addresses of this machine, but services register the one at which others reach "
            f"them: name one of {', '.join(own_addresses())}"
        )


def own_addresses() -> list[str]:
    """List this machine's addresses that can be connected to by writing them alone, loopback ones last."""
    found = {
        address
        for interface in psutil.net_if_addrs().values()
        for each in interface
        if each.family in {socket.AF_INET, socket.AF_INET6}
        and not (address := ip_address(each.address.partition("%")[0])).is_link_local
    }
    return [str(each) for each in sorted(found, key=lambda each: (each.is_loopback, each.version, int(each)))]


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
