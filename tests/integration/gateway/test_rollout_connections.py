"""Connections to rollouts: each agent gets its own answer, whatever the one before left unread."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

import pytest

from flotilla.services.gateway.episodes.connection import MOST_BUFFERED_BYTES, Connection, Connections
from flotilla.shared.errors import Unavailable
from tests.unit.gateway.builders import until

Writes = Sequence[bytes | asyncio.Event]
"""What a rollout answers: bytes, and events that it waits for."""

SECONDS: Final = 20.0
MUCH: Final = 8 * MOST_BUFFERED_BYTES


def answer(text: bytes, *, size: int = 0, headers: bytes = b"") -> bytes:
    """Make an answer whose body is a text, filled up to a size by its last character."""
    body = text.ljust(size, text[-1:])
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n%s\r\n" % (len(body), headers) + body


class Rollout:
    """Answers each request by what its body names; counts connections."""

    def __init__(self, **answers: Writes) -> None:
        self.answers = answers
        self.num_connections = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        while True:
            name = (await request_of(reader)).decode()
            for each in self.answers.get(name, [answer(name.encode())]):
                if isinstance(each, bytes):
                    writer.write(each)
                    await writer.drain()
                else:
                    await each.wait()


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def served(serve: Serve) -> AsyncIterator[tuple[Connections, str]]:
    """Serve connections until the end of the block, and end those that are open then."""
    serving = set[asyncio.Task[None]]()

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        try:
            await serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            writer.close()

    server = await asyncio.start_server(serve_one, "127.0.0.1", 0)
    connections = Connections()
    try:
        async with asyncio.timeout(SECONDS):
            yield connections, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        connections.close()
        server.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving)
        await asyncio.sleep(0)


async def request_of(reader: asyncio.StreamReader) -> bytes:
    """Read a request; return its body."""
    head = await reader.readuntil(b"\r\n\r\n")
    return await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))


async def asked(connections: Connections, address: str, name: str) -> bytes:
    """Ask as an agent does that reads its whole answer."""
    async with connections.posted(address, "/", name.encode(), "") as connection:
        return b"".join([piece async for piece in connection.pieces()])


async def hung_up(
    connections: Connections, address: str, leaves: Callable[[Connection], bool], num_pieces: int
) -> None:
    """Ask as an agent does that hangs up once a state of the connection is reached, and some pieces were passed on."""
    async with connections.posted(address, "/", b"first", "") as connection:
        pieces = connection.pieces()
        for _ in range(num_pieces):
            await anext(pieces)
        await until(lambda: leaves(connection))


STATES: Final[dict[str, tuple[Callable[[asyncio.Event], Writes], Callable[[Connection], bool], int]]] = {
    "with the head": (
        lambda never: [b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n", never, b"first"],
        lambda connection: connection.status == 200,
        0,
    ),
    "within the body": (
        lambda never: [answer(b"first")[:-2], never, b"st"],
        lambda connection: not connection._pieces,
        1,
    ),
    "whole, none passed on": (lambda _: [answer(b"first")], lambda connection: not connection._is_answering, 0),
    "more than is buffered, none passed on": (
        lambda _: [answer(b"first", size=MUCH)],
        lambda connection: connection._buffered >= MOST_BUFFERED_BYTES,
        0,
    ),
    "more than is buffered, some passed on": (
        lambda _: [answer(b"first", size=MUCH)],
        lambda connection: connection._buffered >= MOST_BUFFERED_BYTES,
        1,
    ),
    "whole, some passed on": (
        lambda _: [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n5\r\nfirst\r\n0\r\n\r\n"],
        lambda connection: not connection._is_answering and bool(connection._pieces),
        1,
    ),
}


@pytest.mark.parametrize("state", STATES)
async def test_what_an_agent_that_hangs_up_leaves_is_no_answer_of_another(state: str) -> None:
    writes, leaves, num_pieces = STATES[state]
    rollout = Rollout(first=writes(asyncio.Event()))

    async with served(rollout) as (connections, address):
        await hung_up(connections, address, leaves, num_pieces)

        assert [await asked(connections, address, name) for name in ("second", "third")] == [b"second", b"third"]
        assert rollout.num_connections == 2


async def test_an_agent_that_hangs_up_before_the_head_leaves_no_connection() -> None:
    is_waited_for = asyncio.Event()
    rollout = Rollout(first=[is_waited_for, answer(b"first")])

    async with served(rollout) as (connections, address):
        asking = asyncio.create_task(asked(connections, address, "first"))
        await until(lambda: rollout.num_connections == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        is_waited_for.set()

        assert await asked(connections, address, "second") == b"second"
        assert rollout.num_connections == 2


async def test_two_agents_at_once_have_a_connection_each_which_are_used_again() -> None:
    both = {name: asyncio.Event() for name in ("a", "b")}
    rollout = Rollout(**{name: [event, answer(name.encode(), size=MUCH)] for name, event in both.items()})

    async with served(rollout) as (connections, address):
        asking = [asyncio.create_task(asked(connections, address, name)) for name in ("a", "b")]
        await until(lambda: rollout.num_connections == 2)
        both["b"].set()
        both["a"].set()
        answers = await asyncio.gather(*asking)

        assert [set(each) for each in answers] == [set(b"a"), set(b"b")]
        for _ in range(5):
            await asyncio.gather(*(asked(connections, address, name) for name in ("a", "b")))
        assert rollout.num_connections == 2


async def test_one_of_two_agents_hangs_up_and_the_other_reads_on() -> None:
    rollout = Rollout(first=[answer(b"1", size=MUCH)], second=[answer(b"2", size=MUCH)])

    async with served(rollout) as (connections, address):
        async with connections.posted(address, "/", b"second", "") as other:
            await hung_up(connections, address, lambda each: each._buffered >= MOST_BUFFERED_BYTES, 1)
            third = await asked(connections, address, "third")
            second = b"".join([piece async for piece in other.pieces()])

        assert (set(second), len(second), third) == (set(b"2"), MUCH, b"third")
        assert [await asked(connections, address, "fourth") for _ in range(2)] == [b"fourth"] * 2


@pytest.mark.parametrize(
    "surplus", [b"more", answer(b"stale"), b"HTTP/1.1 200 OK\r\n"], ids=["bytes", "an answer", "a head"]
)
@pytest.mark.parametrize("is_at_once", [True, False])
async def test_what_comes_behind_an_answer_is_no_answer_of_another(surplus: bytes, is_at_once: bool) -> None:
    may_send = asyncio.Event()
    writes = [answer(b"first") + surplus] if is_at_once else [answer(b"first"), may_send, surplus]
    rollout = Rollout(first=writes)

    async with served(rollout) as (connections, address):
        assert await asked(connections, address, "first") == b"first"
        kept = [each for idle in connections._idle.values() for each in idle]
        may_send.set()
        await until(lambda: all(each._is_lost for each in kept))

        assert await asked(connections, address, "second") == b"second"
        assert rollout.num_connections == 2


async def test_an_answer_before_the_request_was_sent_whole_leaves_no_connection() -> None:
    body = b"first".ljust(64 << 20)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        is_second = b"content-length: 6\r\n" in head.lower()
        writer.write(answer(b"second" if is_second else b"refused"))
        await asyncio.Event().wait()

    async with served(serve) as (connections, address):
        async with connections.posted(address, "/", body, "") as connection:
            refused = [piece async for piece in connection.pieces()]

        assert refused == [b"refused"]
        assert await asked(connections, address, "second") == b"second"


async def test_an_interim_answer_is_followed_by_the_answer() -> None:
    interim = b"HTTP/1.1 103 Early Hints\r\ncontent-type: text/x\r\n\r\n"
    rollout = Rollout(first=[interim, answer(b"first", headers=b"x: y\r\n")])

    async with served(rollout) as (connections, address):
        async with connections.posted(address, "/", b"first", "") as connection:
            whole = b"".join([piece async for piece in connection.pieces()])

        assert (connection.status, connection.content_type, whole) == (200, b"application/json", b"first")
        assert await asked(connections, address, "second") == b"second"
        assert rollout.num_connections == 1


@pytest.mark.parametrize("writes", [b"no HTTP at all\r\n\r\n", b"HTTP/1.1 101 Switching\r\nupgrade: x\r\n\r\n"])
async def test_what_is_no_answer_is_unavailability(writes: bytes) -> None:
    async with served(Rollout(first=[writes])) as (connections, address):
        with pytest.raises(Unavailable, match="what came is no answer"):
            await asked(connections, address, "first")

        assert await asked(connections, address, "second") == b"second"


async def test_an_answer_that_breaks_off_is_unavailability_and_one_that_closes_is_whole() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = await request_of(reader)
        writer.write(answer(name, headers=b"connection: close\r\n") if name == b"whole" else answer(name)[:-1])
        writer.close()

    async with served(serve) as (connections, address):
        assert [await asked(connections, address, "whole") for _ in range(2)] == [b"whole"] * 2
        with pytest.raises(Unavailable, match="broke off"):
            await asked(connections, address, "part")


async def test_connections_that_were_idle_for_long_are_closed_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = Rollout()

    async with served(rollout) as (connections, address):
        await asked(connections, address, "first")
        monkeypatch.setattr("flotilla.services.gateway.episodes.connection.KEPT_OPEN_SECONDS", 0.0)
        await asked(connections, address, "second")
        assert rollout.num_connections == 2

        with pytest.raises(Unavailable):
            await asked(connections, "http://127.0.0.1:9", "third")
        assert connections._idle == {}
