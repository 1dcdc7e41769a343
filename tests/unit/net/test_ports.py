"""Which address a service listens on where nobody says."""

import socket
from contextlib import ExitStack

import pytest

from flotilla.shared.environment.settings import ports_from
from flotilla.shared.errors import InvalidRequest, Unavailable
from flotilla.shared.net.dead_peers import TCP_OPTIONS
from flotilla.shared.net.server import ports
from flotilla.shared.net.server.ports import address_towards, lasting_port, listening_socket
from flotilla.shared.net.server.serving import bind


@pytest.mark.parametrize(
    ("url", "address"), [("http://127.0.0.1:8470", "127.0.0.1"), ("http://localhost:8470", "127.0.0.1")]
)
def test_a_service_beside_its_gateway_is_on_loopback(url: str, address: str) -> None:
    assert address_towards(url) == address


def test_a_service_of_a_gateway_elsewhere_is_on_the_address_that_faces_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[object]()

    class Probe:
        def __init__(self, *kind: object) -> None: ...

        def __enter__(self) -> "Probe":
            return self

        def __exit__(self, *error: object) -> None: ...

        def connect(self, place: object) -> None:
            asked.append(place)

        def getsockname(self) -> tuple[str, int]:
            return "10.0.0.3", 40_000

    monkeypatch.setattr(ports.socket, "socket", Probe)

    assert address_towards("http://10.0.0.1:8470") == "10.0.0.3"
    assert asked == [("10.0.0.1", 8470)]


def test_a_gateway_whose_name_means_nothing_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(ports.socket, "getaddrinfo", unknown)

    with pytest.raises(InvalidRequest, match="FLOTILLA_HOST is not set, and what of this machine faces http://gateway"):
        address_towards("http://gateway:8470")


def test_connections_of_a_server_notice_hosts_that_are_gone() -> None:
    with bind("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            found = {option: accepted.getsockopt(socket.IPPROTO_TCP, option) for option in TCP_OPTIONS}
            # It would end what a client reads slowly: one that reads nothing for six seconds is not gone.
            assert found == TCP_OPTIONS | {socket.TCP_USER_TIMEOUT: 0}
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


def test_listeners_without_a_port_of_their_own_keep_to_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    first = lasting_port("127.0.0.1")
    monkeypatch.setenv("FLOTILLA_PORTS", f"{first}-{first + 2}")

    with ExitStack() as stack:
        found = {stack.enter_context(listening_socket("127.0.0.1")).getsockname()[1] for _ in range(2)}
        found.add(stack.enter_context(bind("127.0.0.1", 0)).getsockname()[1])
        assert found == {first, first + 1, first + 2}
        with pytest.raises(Unavailable, match=r"every port of FLOTILLA_PORTS=.* is in use on 127\.0\.0\.1"):
            bind("127.0.0.1", 0)


@pytest.mark.parametrize("text", ["20000", "20000-", "9-3", "0-9", "1-70000", "a-b"])
def test_what_is_no_range_of_ports_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="FLOTILLA_PORTS must be a range of ports, such as 20000-20099, got"):
        ports_from({"FLOTILLA_PORTS": text})
