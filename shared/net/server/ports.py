"""Addresses under which servers are announced, and ports of servers that restart on the same one."""

import errno
import os
import random
import socket
from ipaddress import ip_address
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import psutil

from flotilla.shared.environment.settings import PORTS, ports_from
from flotilla.shared.errors import InvalidRequest

GIVEN_TO_ANYBODY: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST: Final = 10_000
ATTEMPTS: Final = 200
BACKLOG: Final = 1024
WILDCARDS: Final = frozenset({"0.0.0.0", "::"})  # noqa: S104 (named here to be refused, or to be asked about)
"""Wildcard addresses: valid to listen on, not reachable from other machines."""


def listening_socket(host: str, port: int = 0) -> socket.socket:
    """Listen on an address; port 0 takes one of ``FLOTILLA_PORTS`` that is free, or any.

    Raises:
        OSError: the port is taken, all of them are, or the host is no address of this machine.
        InvalidRequest: ``FLOTILLA_PORTS`` is no range.
    """
    allowed = ports_from(os.environ) if port == 0 else None
    # In random order: services that start together do not try the same ones.
    candidates = [port] if allowed is None else random.sample(allowed, len(allowed))
    for each in candidates:
        try:
            return _listen(host, each)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or allowed is None:
                raise
    raise OSError(errno.EADDRINUSE, f"every port of {PORTS}={os.environ[PORTS]} is in use on {host}")


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio turns Nagle's algorithm off for the connections: without, each answer whose head
    # and body are written apart waits 40 ms for the caller's delayed acknowledgement.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def check_can_be_told(bound: socket.socket, said: str) -> None:
    """Check that a socket is bound to one address: others are given it, and are to reach it there.

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


def address_towards(url: str) -> str:
    """Find the address of this machine that packets to a server leave from; nothing is sent.

    Raises:
        InvalidRequest: the server's name means nothing here, or no network leads to it.
    """
    parts, problem = urlsplit(url), "it has no address"
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)
    except OSError as error:
        found, problem = [], error.strerror or str(error)
    # A name may have addresses of a protocol that this machine does not speak.
    for family, kind, protocol, _, place in sorted(found, key=lambda each: each[0] is not socket.AF_INET):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(place)
                return str(probe.getsockname()[0])
        except OSError as error:
            problem = error.strerror or str(error)
    raise InvalidRequest(
        f"FLOTILLA_HOST is not set, and what of this machine faces {url} cannot be found ({problem}): set it to the "
        "address at which the other machines reach this one"
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

    The system does not hand it out as an ephemeral port. A client that calls while the server is unavailable could
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
    """The first ephemeral port; on other systems the lowest that is known."""
    try:
        first = int(GIVEN_TO_ANYBODY.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        first = 32_768
    return max(first, LOWEST + ATTEMPTS)
