"""Addresses that mean something else on each machine or link, and names that lead to one."""

import asyncio
import socket
from ipaddress import IPv6Address, ip_address


def is_of_each_machine(host: str) -> bool:
    """Whether an address means something else on each machine or link, however it is written; no name is resolved."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        found = ip_address(host.partition("%")[0])
    except ValueError:
        try:
            # As resolvers read it: 127.1 is an address too.
            found = ip_address(socket.inet_aton(host))
        except (OSError, ValueError):
            return False
    if isinstance(found, IPv6Address):
        found = found.ipv4_mapped or found
    return found.is_loopback or found.is_link_local or found.is_unspecified


async def address_elsewhere(host: str, port: int) -> str:
    """Resolve the host of a service on another machine, and choose the address to connect to.

    What a service reports of itself is not trusted: a name of its choice could lead its caller to a port of their
    own machine. All addresses of the name count, and the connection goes to the one that was examined.

    Raises:
        OSError: the name cannot be resolved, or leads to this machine or link.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in found]
    own = next((each for each in addresses if is_of_each_machine(each)), None)
    if own is not None or not addresses:
        raise OSError(f"{host} leads to {own or 'no address'}, which means something else on each machine: not tried")
    return addresses[0]
