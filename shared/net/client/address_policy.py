"""Which addresses a URL of a spec may lead to: a grader's, or one of rows.

A URL of a spec makes this service connect somewhere. It must lead to the public Internet, or the
URL would reach into the fleet's own network; with ``allow_private`` it may also lead to the networks that the
operator of the service has named. The name is resolved once and the
connection goes to the address that was checked, so a name cannot mean something else a moment later.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

from flotilla.shared.environment.settings import GRADER_NETWORKS, IPNetwork
from flotilla.shared.errors import GradingFailed

IPAddress = IPv4Address | IPv6Address
Resolver = Callable[[str, int], Awaitable[Sequence[str]]]

NAT64 = IPv6Network("64:ff9b::/96")
GLOBAL_UNICAST = IPv6Network("2000::/3")
"""All that the public Internet uses of IPv6."""
NOT_PUBLIC = (
    IPv4Network("192.88.99.0/24"),  # relays of 6to4, withdrawn: RFC 7526
    IPv4Network("192.31.196.0/24"),  # AS112
    IPv4Network("192.175.48.0/24"),
    IPv6Network("3fff::/20"),  # documentation: RFC 9637
    IPv6Network("5f00::/16"),  # segments of routes: RFC 9602
    IPv6Network("2001::/32"),  # Teredo: its server, not the address inside, decides where packets go
    IPv6Network("2002::/16"),  # 6to4, as good as withdrawn
)
"""What Python's own table takes for global, or what tunnels carry to an address of the sender's choice."""
ISATAP = (0x00005EFE, 0x02005EFE)
"""Third quarter of an address that a tunnel within a site carries to the IPv4 address in the last: RFC 5214."""


class AddressRefused(GradingFailed):
    """The URL leads to an address that the policy does not allow."""


async def resolve(host: str, port: int) -> list[str]:
    """List the addresses of a host, as the operating system resolves it."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def is_public(address: IPAddress) -> bool:
    """Return whether an address is one of the public Internet.

    Of IPv6 forms that carry an IPv4 address, that one counts; those of tunnels are none of it.
    """
    if isinstance(address, IPv6Address):
        inner = address.ipv4_mapped
        if inner is None and address in NAT64:
            inner = IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
        if address not in GLOBAL_UNICAST or (int(address) >> 32) & 0xFFFFFFFF in ISATAP:
            return False
    if any(address in network for network in NOT_PUBLIC):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved and not address.is_unspecified


def is_within(address: IPAddress, networks: Sequence[IPNetwork]) -> bool:
    """Return whether an address is in one of the networks, looking through the IPv6 form of an IPv4 address."""
    inner = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return any(each in network for each in (address, inner) if each is not None for network in networks)


async def permitted_address(
    host: str, port: int, *, private: Sequence[IPNetwork] = (), resolver: Resolver = resolve
) -> str:
    """Resolve a host and choose the address to connect to.

    Args:
        host, port: of the URL.
        private: networks that are allowed though they are not public.
        resolver: lists the addresses of a host.

    All its addresses must be allowed, not only the chosen one: a name with a private address among them is refused.

    Raises:
        AddressRefused: the policy forbids one of its addresses.
        OSError: the name cannot be resolved.
    """
    addresses = [text.partition("%")[0] for text in await resolver(host, port)]
    if not addresses:
        raise OSError(f"{host} has no address")
    for text in addresses:
        if not is_public(ip_address(text)) and not is_within(ip_address(text), private):
            raise AddressRefused(
                f"{host} resolves to {text}, which is not a public address: it needs `allow_private: true` in the "
                f"spec, and a network of the reward service's {GRADER_NETWORKS}"
            )
    return addresses[0]
