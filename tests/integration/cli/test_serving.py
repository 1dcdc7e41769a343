"""Sockets that services listen on."""

import asyncio
import socket
import subprocess
import sys

import httpx
import pytest

from flotilla.shared.errors import Unavailable
from flotilla.shared.net.server.ports import GIVEN_TO_ANYBODY, lasting_port
from flotilla.shared.net.server.serving import address_of, bind


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


ONE_THAT_WAITS = """
import asyncio
from fastapi import FastAPI
from flotilla.shared.net.server import serving

serving.SHUTDOWN_SECONDS = 0.3
app = FastAPI()

@app.get("/news")
async def news() -> None:
    print("asked", flush=True)
    await asyncio.Event().wait()

listening = serving.bind("127.0.0.1", 0)
print(serving.address_of(listening), flush=True)
serving.serve(app, listening)
"""


async def test_who_waits_when_a_server_ends_is_told_to_ask_again() -> None:
    command = [sys.executable, "-c", ONE_THAT_WAITS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None and server.stderr is not None
            address = server.stdout.readline().strip()
            async with httpx.AsyncClient(timeout=30) as client:
                asking = asyncio.create_task(client.get(f"{address}/news"))
                await asyncio.to_thread(server.stdout.readline)

                server.terminate()
                answer = await asking

            assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")
            assert server.wait(10) == 0
            assert "Traceback" not in server.stderr.read()
        finally:
            server.kill()


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
