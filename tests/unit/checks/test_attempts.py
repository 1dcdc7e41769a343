"""Attempts end in one of few outcomes, whoever is at the other end."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from flotilla.shared.checks import attempts
from flotilla.shared.checks.attempts import reach_all
from flotilla.shared.checks.host_checks import Listeners
from flotilla.shared.schemas.checks import ANOTHER, FAILED, REACHED, REFUSED, SILENT, CheckTarget

HEALTHY = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}"


@asynccontextmanager
async def says(words: bytes) -> AsyncIterator[int]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if words.startswith(b"HTTP"):
            await reader.readuntil(b"\r\n\r\n")
        writer.write(words)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def test_ports_of_a_service_that_listens_are_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOTILLA_PORTS", "21000-21999")
    listeners = Listeners("127.0.0.1")
    ports, problem = await listeners.open("ab12")
    async with says(HEALTHY) as port:
        found = await reach_all(
            [CheckTarget(service_id="r", url=f"http://127.0.0.1:{port}", ports=dict(ports))], "ab12"
        )

    listeners.close()
    assert problem is None and set(ports) == {"data", "collective"} and ports["data"] in range(21000, 22000)
    assert [(each.use, each.outcome) for each in found] == [
        ("http", REACHED),
        ("data", REACHED),
        ("collective", REACHED),
    ]


async def test_each_way_to_fail_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "ATTEMPT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        async with says(b"cd34") as stranger:
            ports = {"silent": silent.getsockname()[1], "nobody": nobody.getsockname()[1], "stranger": stranger}
            url = f"http://127.0.0.1:{ports['silent']}"
            found = await reach_all([CheckTarget(service_id="r", url=url, ports=ports)], "ab12")

    assert {each.use: each.outcome for each in found} == {
        "http": SILENT,
        "silent": SILENT,
        "nobody": REFUSED,
        "stranger": ANOTHER,
    }


async def test_health_is_asked_for_at_the_origin_whatever_path_an_address_has() -> None:
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")[0])
        writer.write(HEALTHY)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/admin/delete;x"
    found = await reach_all([CheckTarget(service_id="r", url=url)], "ab12")
    server.close()

    assert found[0].outcome == REACHED and asked == [b"GET /healthz HTTP/1.1"]


async def test_listeners_end_when_nobody_says_so() -> None:
    listeners = Listeners("127.0.0.1", linger_seconds=0.01)
    ports, _ = await listeners.open("ab12")

    async with asyncio.timeout(5):
        while (await reach_one(ports["data"])) is REACHED:
            await asyncio.sleep(0.01)


async def test_whatever_an_address_or_a_port_raises_is_an_outcome_with_its_cause() -> None:
    beyond = {"data": 99_999, "collective": -7, "u" * 40: 1 << 70}
    urls = ("http://127.0.0.1:1", "http://xn--a:1", "http://a\u2024.b..c:1", "http://h:99999")
    found = await reach_all([CheckTarget(service_id="r", url=each, ports=beyond) for each in urls], "ab12")

    assert len(found) == 16 and {each.outcome for each in found[1:]} == {FAILED}
    assert all(each.detail for each in found[1:])


async def reach_one(port: int) -> str:
    target = CheckTarget(service_id="r", url="http://127.0.0.1:1", ports={"data": port})
    return (await reach_all([target], "ab12"))[1].outcome
