"""The way from a closed box to one address."""

import asyncio
import contextlib
import os
from pathlib import Path
from typing import cast

import pytest

from flotilla.agents.relay import MOST_CONNECTIONS, SOCKET, _pump, relaying, url_inside


async def upper(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer in capitals until the other side has said all."""
    writer.write((await reader.read()).upper())
    writer.close()


async def said_through(folder: Path, url: str, text: bytes) -> bytes:
    async with relaying(folder, url):
        reader, writer = await asyncio.open_unix_connection(folder / SOCKET)
        writer.write(text)
        writer.write_eof()
        answer = await reader.read()
        writer.close()
    return answer


async def test_bytes_are_passed_on_both_ways_and_ends_too(tmp_path: Path) -> None:
    async with await asyncio.start_server(upper, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]

        assert await said_through(tmp_path, f"http://127.0.0.1:{port}/v1", b"hello" * 50_000) == b"HELLO" * 50_000


async def test_an_address_where_nobody_listens_ends_the_connection(tmp_path: Path) -> None:
    assert await said_through(tmp_path, "http://127.0.0.1:9/v1", b"hello") == b""


async def test_the_path_of_a_box_may_be_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    monkeypatch.chdir(folder)
    async with (
        await asyncio.start_server(upper, "127.0.0.1", 0) as server,
        relaying(folder, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"),
    ):
        reader, writer = await asyncio.open_unix_connection(SOCKET)
        writer.write(b"hello")
        writer.write_eof()
        answer = await reader.read()
        writer.close()

    assert answer == b"HELLO"


async def test_a_connection_that_is_open_ends_with_the_box(tmp_path: Path) -> None:
    async with await asyncio.start_server(upper, "127.0.0.1", 0) as server:
        async with relaying(tmp_path, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"):
            reader, writer = await asyncio.open_unix_connection(tmp_path / SOCKET)
            writer.write(b"hel")
            await writer.drain()

        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()


async def test_a_box_holds_few_of_this_processs_descriptors_however_many_connections_it_opens(tmp_path: Path) -> None:
    async with await asyncio.start_server(upper, "127.0.0.1", 0) as server:
        before = len(os.listdir("/proc/self/fd"))
        async with relaying(tmp_path, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"):
            many = [await asyncio.open_unix_connection(tmp_path / SOCKET) for _ in range(3 * MOST_CONNECTIONS)]
            await asyncio.sleep(0.2)
            # Of each connection one end is the test's, and the server's beside the relay's two.
            held = len(os.listdir("/proc/self/fd")) - before - len(many)
            for _, writer in many[:-1]:
                writer.close()
            reader, last = many[-1]
            last.write(b"last")
            last.write_eof()
            answered = await asyncio.wait_for(reader.read(), 10)
            last.close()

    assert held <= 3 * MOST_CONNECTIONS + 2
    assert answered == b"LAST", "a further one has its turn when others have ended"


@pytest.mark.parametrize("has_halves", [True, False])
async def test_an_end_inside_is_told_outside_by_tls_too(has_halves: bool) -> None:
    class Outside:
        """A connection of TLS, which cannot be ended by halves, or one without."""

        def __init__(self) -> None:
            self.said: list[str] = []

        def can_write_eof(self) -> bool:
            return has_halves

        def write_eof(self) -> None:
            self.said.append("half")

        def close(self) -> None:
            self.said.append("whole")

    reader, writer = asyncio.StreamReader(), Outside()
    reader.feed_eof()

    await _pump(reader, cast(asyncio.StreamWriter, writer))

    assert writer.said == ["half" if has_halves else "whole"]


def test_an_address_has_its_path_inside() -> None:
    assert url_inside("https://gateway.example:8470/v1") == "http://127.0.0.1:47080/v1"
