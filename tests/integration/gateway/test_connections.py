"""What one caller may take of a server: every service is served so. Raw sockets, deadlines made short."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import uvicorn

from flotilla.shared.net.authorisation.tokens import Credentials
from flotilla.shared.net.server.connections import Connection, Turns, connection_of
from flotilla.shared.net.server.gatekeeper import Gatekeeper
from flotilla.shared.net.server.limits import ConnectionLimits
from flotilla.shared.net.server.serving import bind, config_of
from tests.unit.gateway.builders import until

SHORT = ConnectionLimits(head_seconds=0.3, body_seconds=0.3, idle_seconds=1, unread_seconds=0.5)
LONG_ENOUGH = 10.0
WHOLE = b"GET /%s HTTP/1.1\r\nhost: h\r\n\r\n"


class App:
    """Notes the bodies that came whole; ``/slow`` waits to be told, ``/much`` and ``/more`` send what nobody reads."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.unread: list[int] = []
        self.broken = self.waiting = 0
        self.may_answer = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.broken += 1
                return
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.bodies.append(body)
        connection = connection_of(scope)
        assert connection is not None
        self.unread.append(unread_of(connection))
        if scope["path"] == "/watched":
            connection.watched()
            self.unread.append(unread_of(connection))
        if scope["path"] == "/turns":
            connection.read_in_turn()
        if scope["path"] == "/slow":
            self.waiting += 1
            await self.may_answer.wait()
        size = {"/much": 8 << 20, "/more": 256 << 20}.get(scope["path"], 2)
        head = [(b"content-length", str(size).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        for start in range(0, size, 1 << 20):
            piece = b"x" * min(1 << 20, size - start)
            is_last = start + len(piece) == size
            await send({"type": "http.response.body", "body": piece, "more_body": not is_last})


def unread_of(connection: Connection) -> int:
    """Read for how many milliseconds the kernel lets nothing of an answer be read."""
    accepted = connection.transport.get_extra_info("socket")
    return int(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))


@asynccontextmanager
async def served(
    limits: ConnectionLimits = SHORT, *, token: str | None = None
) -> AsyncIterator[tuple[App, uvicorn.Server, int]]:
    app, listening = App(), bind("127.0.0.1", 0)
    behind = app if token is None else Gatekeeper(app, credentials=Credentials(token), max_bytes=1000)
    server = uvicorn.Server(config_of(behind, limits))
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    task = asyncio.create_task(server.serve(sockets=[listening]))
    await until(lambda: server.started)
    try:
        yield app, server, listening.getsockname()[1]
    finally:
        app.may_answer.set()
        server.should_exit = server.force_exit = True
        await task


async def sent(port: int, *pieces: bytes, every: float = 0.0, again: bytes = b"") -> bytes:
    """Send pieces, then one more over and over; return what the server says until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def send() -> None:
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            while again:
                await asyncio.sleep(every)
                writer.write(again)
                await writer.drain()

    sending = asyncio.create_task(send())
    answer = bytearray()
    try:
        async with asyncio.timeout(LONG_ENOUGH):
            with contextlib.suppress(ConnectionError):
                while piece := await reader.read(65536):
                    answer += piece
    finally:
        sending.cancel()
        writer.close()
    return bytes(answer)


@pytest.mark.parametrize(
    ("pieces", "again", "status"),
    [
        pytest.param((), b"", b"408", id="nothing"),
        pytest.param((b"GET / HTTP/1.1\r\nhost: h\r\nx: ",), b"a", b"408", id="a byte of a header at a time"),
        pytest.param((), b"\r\n", b"408", id="empty lines"),
        pytest.param((b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 900\r\n\r\n",), b"a", b"408", id="slow body"),
        pytest.param(
            (b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n",),
            b"1\r\na\r\n",
            b"408",
            id="endless chunks",
        ),
        pytest.param((b"GET / HTTP/1.1\r\nx: ",), b"a" * 8192, b"431", id="a header without an end"),
        pytest.param((b"GET /",), b"a" * 8192, b"431", id="a path without an end"),
        pytest.param((b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\n\r\n",), b"", b"431", id="a long path"),
        pytest.param(
            (b"GET / HTTP/1.1\r\n" + b"".join(b"x%d: a\r\n" % n for n in range(200)) + b"\r\n",),
            b"",
            b"431",
            id="many headers",
        ),
        pytest.param((b"GET / HTTP/1.1\r\nx: " + b"a" * 100_000 + b"\r\n\r\n",), b"", b"431", id="a large header"),
        pytest.param((b"\x16\x03\x01\x00\xa5\x01\x00",), b"", b"400", id="no HTTP"),
    ],
)
async def test_who_draws_a_request_out_or_makes_it_large_is_dropped(
    pieces: tuple[bytes, ...], again: bytes, status: bytes
) -> None:
    async with served() as (app, server, port):
        answer = await sent(port, *pieces, every=0.02, again=again)
        await until(lambda: not server.server_state.connections)

    assert answer.startswith(b"HTTP/1.1 " + status), answer
    assert b"connection: close" in answer
    assert app.bodies == [], "nothing of it was done"


async def test_who_says_no_more_after_an_answer_is_dropped_and_so_is_a_second_request_that_is_drawn_out() -> None:
    async with served() as (_, _, port):
        idle = await sent(port, WHOLE % b"")
        slow = await sent(port, WHOLE % b"", b"GET", every=0.05, again=b"a")

    assert idle.startswith(b"HTTP/1.1 200") and idle.endswith(b"xx")
    assert slow.count(b"HTTP/1.1 ") == 2 and b"HTTP/1.1 40" in slow


async def test_who_waits_for_an_answer_is_not_dropped() -> None:
    async with served() as (app, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        # The second request waits in the connection while the first is answered.
        writer.write(WHOLE % b"slow" + b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 2\r\n\r\nab")
        await until(lambda: app.waiting == 1)
        await asyncio.sleep(3 * SHORT.head_seconds)  # as long as nothing may be said elsewhere
        app.may_answer.set()
        async with asyncio.timeout(LONG_ENOUGH):
            assert (await reader.readuntil(b"xx")).startswith(b"HTTP/1.1 200")
            assert (await reader.readuntil(b"xx")).startswith(b"HTTP/1.1 200")
        writer.close()

    assert app.bodies == [b"", b"ab"]


@pytest.mark.parametrize(
    "request_of", [WHOLE % b"more", WHOLE.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n") % b"much"]
)
async def test_who_does_not_read_an_answer_is_dropped(request_of: bytes) -> None:
    async with served() as (app, server, port):
        with socket.socket() as caller:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            caller.setblocking(False)
            await asyncio.get_running_loop().sock_connect(caller, ("127.0.0.1", port))
            await asyncio.get_running_loop().sock_sendall(caller, request_of)
            await until(lambda: len(app.bodies) == 1)
            await until(lambda: not server.server_state.connections, seconds=LONG_ENOUGH)


async def test_while_a_request_waits_the_kernel_ends_a_connection_whose_host_is_gone() -> None:
    """Where there is a limit of what is unread, its probes end nothing before: see ``tcp(7)``."""
    async with served() as (app, _, port):
        await sent(port, WHOLE % b"watched", WHOLE % b"after", every=0.1)

    bound = int(SHORT.unread_seconds * 1000)
    assert app.unread == [bound, 0, bound]


async def test_a_connection_whose_turn_comes_late_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(_: Turns, connection: Connection) -> None:
        asyncio.get_running_loop().call_later(SHORT.idle_seconds + 0.5, connection.go_on)

    monkeypatch.setattr(Turns, "take", late)
    async with served() as (app, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for path in (b"turns", b"next"):
            writer.write(WHOLE % path)
            async with asyncio.timeout(LONG_ENOUGH):
                assert (await reader.readuntil(b"xx")).startswith(b"HTTP/1.1 200")
        writer.close()

    assert len(app.bodies) == 2


async def test_one_address_has_its_share_of_the_connections_only() -> None:
    async with served(replace(SHORT, per_address=2, head_seconds=5)) as (_, server, port):
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        await until(lambda: len(server.server_state.connections) == 2)
        refused = await sent(port)
        held[0][1].close()
        await until(lambda: len(server.server_state.connections) == 1)
        let_in = await sent(port, WHOLE % b"")
        held[1][1].close()

    assert refused.startswith(b"HTTP/1.1 503")
    assert let_in.startswith(b"HTTP/1.1 200")


async def test_beyond_all_connections_requests_are_refused() -> None:
    async with served(replace(SHORT, connections=2, head_seconds=5)) as (_, server, port):
        _, held = await asyncio.open_connection("127.0.0.1", port)
        await until(lambda: len(server.server_state.connections) == 1)
        refused = await sent(port, WHOLE % b"")
        held.close()

    assert refused.startswith(b"HTTP/1.1 503")


UNKNOWN = b"POST /x HTTP/1.1\r\nhost: h\r\nauthorization: Bearer wrong\r\nconnection: close\r\n\r\n"
KNOWN = UNKNOWN.replace(b"wrong", b"right")


async def test_who_is_refused_over_and_over_is_told_to_wait_and_who_has_a_token_never_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    few = replace(SHORT, refusals=3, refusals_per_second=0.1)
    async with served(few, token="right") as (app, _, port):
        too_many = b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 200
        refused = [(await sent(port, what))[:12] for what in (UNKNOWN, b"\x00\xff" * 50, too_many)]
        again = [await sent(port, what) for what in (UNKNOWN, b"\x00\xff" * 50)]
        known = [await sent(port, KNOWN) for _ in range(5)]
        reading = await sent(port, WHOLE.replace(b"/%s HTTP/1.1\r\n", b"/healthz HTTP/1.1\r\nconnection: close\r\n"))

    assert refused == [b"HTTP/1.1 401", b"HTTP/1.1 400", b"HTTP/1.1 431"]
    for answer in again:
        head = answer.lower()
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert b"\r\nretry-after: 10\r\n" in head
        assert b"\r\nconnection: close\r\n" in head
    assert {answer[:12] for answer in (*known, reading)} == {b"HTTP/1.1 200"}
    assert len(app.bodies) == 6
    assert [record.message for record in caplog.records if "refused" in record.message] == [
        "an address sends what is refused, over and over"
    ]
    assert not [record for record in caplog.records if "Invalid HTTP" in record.message]
