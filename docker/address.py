"""Which address a container's service listens on and registers with: decided once, by the entry point."""

import ipaddress
import os
import socket
from collections.abc import Iterable


def choose_address(addresses: Iterable[str]) -> str:
    """Return the first IPv4 address, or the first IPv6 address where there is no other.

    Those that no other container reaches are left out: loopback and link-local ones.

    Raises:
        ValueError: none is left.
    """
    usable = [
        address
        for address in map(ipaddress.ip_address, addresses)
        if not (address.is_loopback or address.is_link_local or address.is_unspecified)
    ]
    if not usable:
        raise ValueError("this container has no address that others reach: set FLOTILLA_HOST")
    return str(min(usable, key=lambda address: address.version))


def own_address() -> str:
    """Return ``FLOTILLA_HOST``, or the address that this container's name resolves to."""
    if host := os.environ.get("FLOTILLA_HOST"):
        return host
    found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    return choose_address(str(entry[4][0]) for entry in found)


def in_url(host: str) -> str:
    """Write an address as a URL has it: one of IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host
