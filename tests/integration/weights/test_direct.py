"""Weights over plain connections: what HTTP let in gets its range, once, whole or resumed, and nobody else a byte."""

import asyncio
import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import pytest

from flotilla.shared.errors import Conflict, WeightTransferFailed
from flotilla.shared.net.authorisation.tokens import Credentials
from flotilla.shared.weights.image.image import WeightImage
from flotilla.shared.weights.image.prefix_checksum import PrefixChecksum
from flotilla.shared.weights.pull import direct as direct_module
from flotilla.shared.weights.pull.client import WeightPuller
from flotilla.shared.weights.pull.direct import DirectReceiver
from flotilla.shared.weights.pull.sender import InlineSender
from flotilla.shared.weights.pull.server import WANTS_TICKET
from tests.integration.weights.processes import an_image
from tests.integration.weights.test_pull import DEADLINE, TOKEN, Server, a_server

Send = Callable[[WeightImage, socket.socket, range], None]
send_all: Send = WeightImage.send


@pytest.fixture
def image() -> Iterator[WeightImage]:
    with an_image(num_megabytes=4) as made:
        yield made


@contextlib.asynccontextmanager
async def a_direct_server() -> AsyncIterator[Server]:
    async with a_server() as server:
        with server.images.served_directly("127.0.0.1", InlineSender()):
            yield server


def sending(monkeypatch: pytest.MonkeyPatch, *sends: Send) -> list[range]:
    """Send the first ranges otherwise, the others as they are; gives all that are sent."""
    spans: list[range] = []
    others = list(sends)

    def send(image: WeightImage, connection: socket.socket, span: range) -> None:
        spans.append(span)
        (others.pop(0) if others else send_all)(image, connection, span)

    monkeypatch.setattr(WeightImage, "send", send)
    return spans


def cut_after(num_bytes: int, then: Callable[[], None] = lambda: None) -> Send:
    def send(image: WeightImage, connection: socket.socket, span: range) -> None:
        if num_bytes:
            send_all(image, connection, span[:num_bytes])
        then()

    return send


async def pulled(server: Server, directory: Path) -> Path:
    return await WeightPuller(Credentials(TOKEN))(server.url(3), 3, directory, DEADLINE)


async def test_no_byte_of_the_image_passes_the_event_loop(
    image: WeightImage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_direct_server() as server:
        server.images.publish(3, image.path)
        spans = sending(monkeypatch)
        server.faults.flip = True  # it would damage what is the answer's body

        path = await pulled(server, tmp_path)

    assert path.read_bytes() == image.view
    assert spans == [range(image.image_bytes)]


async def test_bytes_are_summed_as_they_come_and_never_read_again(
    image: WeightImage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_direct_server() as server:
        server.images.publish(3, image.path)
        monkeypatch.setattr(WeightImage, "read_at", None)

        path = await pulled(server, tmp_path)

    assert path.read_bytes() == image.view


async def test_bytes_go_by_the_mapping_into_memory_that_is_there(
    image: WeightImage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with an_image(num_megabytes=4, seed=1) as free:

        def lend(image_bytes: int) -> WeightImage:
            free.take_back()
            return free

        async with a_direct_server() as server:
            server.images.publish(3, image.path)
            sending(monkeypatch, cut_after(2_500_000))
            monkeypatch.setattr(os, "pwrite", None)

            path = await WeightPuller(Credentials(TOKEN))(server.url(3), 3, tmp_path, DEADLINE, reuse=lend)

        assert path == free.path
        assert path.read_bytes() == image.view
        free.own_again()


async def test_a_source_that_dies_within_a_range_is_asked_for_the_rest(
    image: WeightImage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_direct_server() as server:
        server.images.publish(3, image.path)
        spans = sending(monkeypatch, cut_after(2_500_000), cut_after(0), cut_after(1_000_000))

        path = await pulled(server, tmp_path)

    assert path.read_bytes() == image.view
    assert [span.start for span in spans] == [0, 2_500_000, 2_500_000, 3_500_000]


async def test_a_version_that_was_published_again_meanwhile_is_taken_from_its_beginning(
    image: WeightImage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with an_image(num_megabytes=4, seed=1) as other:
        async with a_direct_server() as server:
            server.images.publish(3, image.path)
            spans = sending(monkeypatch, cut_after(2_500_000, lambda: server.images.publish(3, other.path)))

            path = await pulled(server, tmp_path)

        assert path.read_bytes() == other.view
    assert [span.start for span in spans] == [0, 0]
    assert list(tmp_path.iterdir()) == [path]


async def test_wrong_bytes_are_refused(image: WeightImage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_direct_server() as server:
        server.images.publish(3, image.path)
        sending(monkeypatch, lambda image, connection, span: connection.sendall(bytes(len(span))))

        with pytest.raises(WeightTransferFailed, match="checksum"):
            await pulled(server, tmp_path)

    assert list(tmp_path.iterdir()) == []


async def test_a_pull_that_finds_no_room_midway_says_so_and_leaves_none_taken(
    image: WeightImage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, positions = os.pwrite, []

    def until_full(file: int, data: memoryview, position: int) -> int:
        positions.append(position)
        if position >= 1 << 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data, position)

    async with a_direct_server() as server:
        server.images.publish(3, image.path)
        monkeypatch.setattr(os, "pwrite", until_full)

        with pytest.raises(WeightTransferFailed, match="ran out of room"):
            await pulled(server, tmp_path)

    assert positions[0] == 0
    assert list(tmp_path.iterdir()) == []
    await until_writable(image)


async def test_a_port_that_cannot_be_reached_is_done_without(
    image: WeightImage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_direct_server() as server:
        server.images.publish(3, image.path)
        with socket.create_server(("127.0.0.1", 0)) as unused:
            monkeypatch.setattr(direct_module.DirectServer, "port", unused.getsockname()[1])
        spans = sending(monkeypatch)

        path = await pulled(server, tmp_path)

    assert path.read_bytes() == image.view
    assert spans == []


async def test_a_cancelled_pull_leaves_no_file_and_no_lock(
    image: WeightImage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_direct_server() as server:
        server.images.publish(3, image.path)
        begun = asyncio.Event()
        loop = asyncio.get_running_loop()

        def stall(image: WeightImage, connection: socket.socket, span: range) -> None:
            send_all(image, connection, span[:1000])
            loop.call_soon_threadsafe(begun.set)
            connection.recv(1)  # until the other side ends

        sending(monkeypatch, stall)
        pulling = asyncio.create_task(pulled(server, tmp_path))
        await asyncio.wait_for(begun.wait(), DEADLINE)

        pulling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pulling

        assert list(tmp_path.iterdir()) == []
        await until_writable(image)


async def test_who_waits_for_a_core_can_be_stopped(image: WeightImage) -> None:
    async with a_direct_server() as server:
        server.images.publish(3, image.path)
        answer = await answer_with_ticket(server)
        ticket, none_free = bytes.fromhex(answer.headers["flotilla-ticket"]), threading.Semaphore(0)
        with WeightImage.create(image.image_bytes) as target:
            receiver = DirectReceiver(
                "127.0.0.1",
                int(answer.headers["flotilla-port"]),
                connect_seconds=DEADLINE,
                silence_seconds=DEADLINE,
                cores=none_free,
                checksum=PrefixChecksum(none_free),
            )
            receiving = asyncio.ensure_future(asyncio.to_thread(receiver.receive, ticket, target, range(10, 20)))
            try:
                while not receiver.is_connected:
                    await asyncio.sleep(0.005)

                receiver.stop()

                with pytest.raises(ConnectionError, match="stopped"):
                    await asyncio.wait_for(asyncio.shield(receiving), DEADLINE)
            finally:
                none_free.release()
                await asyncio.wait([receiving])


async def test_a_ticket_is_good_once_and_soon(image: WeightImage, monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_direct_server() as server:
        server.images.publish(3, image.path)
        first = await answer_with_ticket(server)
        port = int(first.headers["flotilla-port"])
        ticket = bytes.fromhex(first.headers["flotilla-ticket"])

        once, again, guessed = [
            await asyncio.to_thread(shown, port, each) for each in (ticket, ticket, bytes(len(ticket)))
        ]

        assert (once, again, guessed) == (bytes(image.view[10:20]), b"", b"")
        monkeypatch.setattr(direct_module, "CLAIM_SECONDS", 0.05)
        late = bytes.fromhex((await answer_with_ticket(server)).headers["flotilla-ticket"])
        await until_writable(image)
        assert await asyncio.to_thread(shown, port, late) == b""


async def test_strangers_keep_no_member_out(image: WeightImage) -> None:
    async with a_direct_server() as server:
        server.images.publish(3, image.path)
        given = await answer_with_ticket(server)
        port, ticket = int(given.headers["flotilla-port"]), bytes.fromhex(given.headers["flotilla-ticket"])
        with contextlib.ExitStack() as strangers:
            idle = [strangers.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(100)]
            sent = await asyncio.to_thread(shown, port, ticket)
            idle[0].settimeout(1.0)  # less than a stranger has to show a ticket
            assert await asyncio.to_thread(idle[0].recv, 1) == b"", "the oldest is closed first"

        assert sent == bytes(image.view[10:20])


async def test_a_ticket_must_come_whole_and_soon(image: WeightImage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_module, "HANDSHAKE_SECONDS", 0.3)
    async with a_direct_server() as server:
        server.images.publish(3, image.path)
        port = int((await answer_with_ticket(server)).headers["flotilla-port"])
        with socket.create_connection(("127.0.0.1", port)) as slow:

            def drip() -> int:
                """Show a byte at a time; return how many were taken."""
                for num in range(direct_module.TICKET_BYTES):
                    try:
                        slow.send(b"x")
                        slow.settimeout(0.05)
                        if not slow.recv(1):
                            return num
                    except TimeoutError:
                        continue
                    except ConnectionError:
                        return num
                return direct_module.TICKET_BYTES

            assert await asyncio.to_thread(drip) < direct_module.TICKET_BYTES


async def test_who_is_not_let_in_gets_no_ticket(image: WeightImage) -> None:
    async with a_direct_server() as server:
        server.images.publish(3, image.path)

        answer = await answer_with_ticket(server, token="wrong")

    assert answer.status_code == 401
    assert "flotilla-ticket" not in answer.headers


async def answer_with_ticket(server: Server, token: str = TOKEN, span: str = "bytes=10-19") -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}", WANTS_TICKET: "1", "Range": span}
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.get(server.url(3), headers=headers)


def shown(port: int, ticket: bytes) -> bytes:
    """Show a ticket and read what comes."""
    with socket.create_connection(("127.0.0.1", port), DEADLINE) as connection:
        connection.sendall(ticket)
        parts = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(1 << 16):
                parts += part
        return parts


async def until_writable(image: WeightImage) -> None:
    """Wait until nobody else has the image locked."""
    ends_at = time.monotonic() + DEADLINE
    while True:
        try:
            with image.writing():
                return
        except Conflict:
            assert time.monotonic() < ends_at, "somebody still reads the image"
            await asyncio.sleep(0.01)
