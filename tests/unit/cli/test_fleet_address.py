"""Where a local fleet listens is checked before anything is started."""

import socket

import pytest

from flotilla.cli.fleet import check_port, url_of
from flotilla.shared.errors import InvalidRequest, Unavailable


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1", "2001:db8::1"])
def test_a_host_that_is_not_this_machine_is_not_mistaken_for_a_port_in_use(host: str) -> None:
    with pytest.raises(InvalidRequest, match=f"--host {host} is no address of this machine: "):
        check_port(host, 0)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0"])
def test_a_host_that_stands_for_all_addresses_is_refused_with_those_that_others_reach(host: str) -> None:
    with pytest.raises(InvalidRequest, match=f"--host {host} stands for all addresses of this machine.* 127.0.0.1"):
        check_port(host, 0)


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        with pytest.raises(Unavailable, match=rf"port {port} on 127.0.0.1 cannot be used .+: choose another --port"):
            check_port("127.0.0.1", port)


@pytest.mark.parametrize(("host", "url"), [("::1", "http://[::1]:8470"), ("127.0.0.1", "http://127.0.0.1:8470")])
def test_an_address_of_ipv6_is_written_in_brackets(host: str, url: str) -> None:
    assert url_of(host, 8470) == url
