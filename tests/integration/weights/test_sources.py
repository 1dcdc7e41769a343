"""An image from several sources: each gives a part, and whoever lies, stalls or dies is left for the others."""

import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from shared.credentials import Credentials
from shared.errors import WeightTransferFailed
from shared.weights import missing as missing_module
from shared.weights import pull_client
from shared.weights.direct import DirectServer
from shared.weights.image import WeightImage
from shared.weights.pull_client import WeightPuller
from shared.weights.sender import InlineSender
from tests.integration.weights.processes import an_image
from tests.integration.weights.test_direct import Send, send_all
from tests.integration.weights.test_pull import DEADLINE, TOKEN, Server, a_server

SIZE = 8
"""In megabytes: eight ranges."""


@pytest.fixture
def image() -> Iterator[WeightImage]:
    with an_image(num_megabytes=SIZE) as made:
        yield made


@pytest.fixture(autouse=True)
def _small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missing_module, "RANGE_BYTES", 1 << 20)
    monkeypatch.setattr(pull_client, "STALL_SECONDS", 0.3)


class Source:
    """A server of one image whose plain connections may be made to do wrong."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.spans: list[range] = []
        self.send: Send = send_all

    @property
    def url(self) -> str:
        return self.server.url(3)


@contextlib.asynccontextmanager
async def sources(monkeypatch: pytest.MonkeyPatch, *images: WeightImage) -> AsyncIterator[list[Source]]:
    """Serve an image each. Who sends is told apart by the port that the connection came to."""
    async with contextlib.AsyncExitStack() as stack:
        made: dict[int, Source] = {}
        for image in images:
            server = await stack.enter_async_context(a_server())
            stack.enter_context(server.images.served_directly("127.0.0.1", InlineSender()))
            server.images.publish(3, image.path)
            assert isinstance(server.images.direct, DirectServer)
            made[server.images.direct.port] = Source(server)

        def send(image: WeightImage, connection: socket.socket, span: range) -> None:
            source = made[connection.getsockname()[1]]
            source.spans.append(span)
            source.send(image, connection, span)

        monkeypatch.setattr(WeightImage, "send", send)
        yield list(made.values())


async def pulled(directory: Path, image: WeightImage, trainer: Source, *peers: Source) -> Path:
    pull = WeightPuller(Credentials(TOKEN))
    urls = [each.url for each in peers]
    return await pull(trainer.url, 3, directory, DEADLINE, checksum=image.checksum(), peers=urls)


def slowly(image: WeightImage, connection: socket.socket, span: range) -> None:
    """Send as a network would: nobody gets it all before the others begin."""
    time.sleep(0.05)
    connection.sendall(image.view[span.start : span.stop])


def in_silence(image: WeightImage, connection: socket.socket, span: range) -> None:
    connection.sendall(image.view[span.start : span.start + 1000])
    connection.recv(1)  # until the other side ends


def halfway(image: WeightImage, connection: socket.socket, span: range) -> None:
    connection.sendall(image.view[span.start : span.start + len(span) // 2])
    connection.shutdown(socket.SHUT_RDWR)


def as_zeros(image: WeightImage, connection: socket.socket, span: range) -> None:
    connection.sendall(bytes(len(span)))


def without_end(image: WeightImage, connection: socket.socket, span: range) -> None:
    """Send wrong bytes until the other side ends."""
    with contextlib.suppress(OSError):
        while True:
            connection.sendall(bytes(1 << 20))


def by_drops(image: WeightImage, connection: socket.socket, span: range) -> None:
    """Send a byte now and then: no silence is ever long."""
    with contextlib.suppress(OSError):
        for position in span:
            connection.sendall(image.view[position : position + 1])
            time.sleep(0.05)


async def test_every_source_gives_a_part_and_no_byte_comes_twice(
    image: WeightImage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_client, "STALL_SECONDS", DEADLINE)  # a busy machine is no stall
    async with sources(monkeypatch, image, image, image) as three:
        for source in three:
            source.send = slowly

        path = await pulled(tmp_path, image, *three)

    assert path.read_bytes() == image.view
    assert all(source.spans for source in three)
    spans = sorted((span for source in three for span in source.spans), key=lambda span: span.start)
    assert [span.stop for span in spans[:-1]] == [span.start for span in spans[1:]]
    assert (spans[0].start, spans[-1].stop) == (0, image.image_bytes)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("wrong", [in_silence, halfway, as_zeros, without_end, by_drops])
@pytest.mark.parametrize("is_trainer", [False, True], ids=["rollout", "trainer"])
async def test_a_source_that_does_wrong_is_left_for_another(
    image: WeightImage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Send, is_trainer: bool
) -> None:
    async with sources(monkeypatch, image, image) as (trainer, peer):
        bad, good = (trainer, peer) if is_trainer else (peer, trainer)
        bad.send, good.send = wrong, slowly

        started = time.monotonic()
        path = await pulled(tmp_path, image, trainer, peer)

    assert path.read_bytes() == image.view
    assert bad.spans, "it was asked"
    assert time.monotonic() - started < DEADLINE / 2
    assert list(tmp_path.iterdir()) == [path]


async def test_a_source_that_dies_is_left_and_what_it_sent_is_kept(
    image: WeightImage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sources(monkeypatch, image, image) as (trainer, peer):
        listening = peer.server.images.direct
        assert listening is not None

        def dies(image: WeightImage, connection: socket.socket, span: range) -> None:
            halfway(image, connection, span)
            listening.close()

        peer.send, trainer.send = dies, slowly

        path = await pulled(tmp_path, image, trainer, peer)

    assert path.read_bytes() == image.view
    # All of it, unless the end of the connection overtook some of what was sent.
    first = peer.spans[0]
    kept = range(first.start + 1, first.start + len(first) // 2 + 1)
    assert any(span.start in kept for source in (trainer, peer) for span in source.spans)


async def test_a_source_with_another_image_under_the_number_gives_nothing(
    image: WeightImage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with an_image(num_megabytes=SIZE, seed=1) as other:
        async with sources(monkeypatch, image, other) as (trainer, peer):
            path = await pulled(tmp_path, image, trainer, peer)

    assert path.read_bytes() == image.view
    assert peer.spans == []


async def test_wrong_bytes_of_every_source_are_refused(
    image: WeightImage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sources(monkeypatch, image, image) as (trainer, peer):
        trainer.send = peer.send = as_zeros

        with pytest.raises(WeightTransferFailed, match="checksum"):
            await pulled(tmp_path, image, trainer, peer)

    assert list(tmp_path.iterdir()) == []
    assert not list(Path("/dev/shm").glob(f"flotilla-weights-{os.getpid()}-*.partial"))


async def test_a_pull_leaves_half_of_the_cores_to_others(
    image: WeightImage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    move, moving, most = os.splice, [], 0

    def slow(source: int, target: int, count: int, *, offset_dst: int | None = None, flags: int = 0) -> int:
        nonlocal most
        if offset_dst is None:
            return move(source, target, count, flags=flags)
        moving.append(offset_dst)
        most = max(most, len(moving))
        time.sleep(0.01)
        moving.remove(offset_dst)
        return move(source, target, count, offset_dst=offset_dst)

    monkeypatch.setattr(os, "splice", slow)
    async with sources(monkeypatch, image, image) as (trainer, peer):
        path = await pulled(tmp_path, image, trainer, peer)

    assert path.read_bytes() == image.view
    assert most == 1


async def test_without_a_checksum_only_the_trainer_is_asked(
    image: WeightImage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sources(monkeypatch, image, image) as (trainer, peer):
        pull = WeightPuller(Credentials(TOKEN))
        path = await pull(trainer.url, 3, tmp_path, DEADLINE, peers=[peer.url])

    assert path.read_bytes() == image.view
    assert peer.spans == []
