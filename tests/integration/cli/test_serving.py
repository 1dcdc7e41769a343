"""Sockets that services listen on."""

import asyncio
import socket

import pytest

from shared.errors import Unavailable
from shared.ports import GIVEN_TO_ANYBODY, lasting_port
from shared.serving import address_of, bind


async def test_accepted_connections_send_small_answers_at_once() -> None:
    nodelay: list[int] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted = writer.get_extra_info("socket")
        nodelay.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    with bind("127.0.0.1", 0) as listening:
        async with await asyncio.start_server(accept, sock=listening):
            reader, writer = await asyncio.open_connection(*listening.getsockname())
            await reader.read()
            writer.close()
            await writer.wait_closed()

    assert nodelay == [1]


def test_a_port_in_use_is_named() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]

        with pytest.raises(Unavailable, match=str(port)):
            bind("127.0.0.1", port)


def test_an_address_names_the_bound_port() -> None:
    with bind("127.0.0.1", 0) as listening:
        assert address_of(listening) == f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.skipif(not GIVEN_TO_ANYBODY.exists(), reason="the system does not say which ports it gives")
def test_a_lasting_port_is_free_and_given_to_nobody_else() -> None:
    first, last = map(int, GIVEN_TO_ANYBODY.read_text().split())

    port = lasting_port("127.0.0.1")

    assert not first <= port <= last
    with bind("127.0.0.1", port) as listening:
        assert address_of(listening).endswith(f":{port}")
