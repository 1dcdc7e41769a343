"""What a host name or address in a spec or a service's settings implies about its location."""

from ipaddress import ip_address


def is_loopback(host: str) -> bool:
    """Return whether a host, a name or an address, is each machine's own."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
