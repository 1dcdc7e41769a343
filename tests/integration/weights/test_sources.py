"""An image from several sources: each gives a part, and whoever lies, stalls or dies is left for the others."""

import asyncio
import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from flotilla.shared.errors import FlotillaError, WeightTransferFailed
from flotilla.shared.net.authorisation.tokens import Credentials
from flotilla.shared.weights.image.image import WeightImage
from flotilla.shared.weights.pull import client as pull_client
from flotilla.shared.weights.pull import direct as direct_module
from flotilla.shared.weights.pull import http_source
from flotilla.shared.weights.pull import source as missing_module
from flotilla.shared.weights.pull.client import WeightPuller
from flotilla.shared.weights.pull.direct import DirectServer
from flotilla.shared.weights.pull.sender import InlineSender
from flotilla.shared.weights.pull.source import Arrival, ArrivingImage
from tests.integration.weights.processes import an_image
from tests.integration.weights.test_direct import Send, send_all
from tests.integration.weights.test_pull import DEADLINE, TOKEN, Server, a_server

SIZE = 8
"""In megabytes: eight ranges."""
PATIENCE = 120.0
"""Far above what any pull here takes on a busy machine, and far below what a source that does wrong would take."""


@pytest.fixture
def image() -> Iterator[WeightImage]:
    with an_image(num_megabytes=SIZE) as made:
        yield made


@pytest.fixture(autouse=True)
def _small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missing_module, "RANGE_BYTES", 1 << 20)
    monkeypatch.setattr(pull_client, "STALL_SECONDS", 0.3)
    monkeypatch.setattr(http_source, "SILENCE_SECONDS", 10 * PATIENCE)


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


async def pulled(
    directory: Path, image: WeightImage, trainer: Source, *peers: Source, deadline: float = DEADLINE
) -> Path:
    pull = WeightPuller(Credentials(TOKEN))
    urls = [each.url for each in peers]
    return await pull(trainer.url, 3, directory, deadline, checksum=image.checksum(), peers=urls)


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
        asked = threading.Event()

        def when_asked(image: WeightImage, connection: socket.socket, span: range) -> None:
            asked.set()
            wrong(image, connection, span)

        def once_it_was(image: WeightImage, connection: socket.socket, span: range) -> None:
            assert asked.wait(PATIENCE)
            slowly(image, connection, span)

        bad.send, good.send = when_asked, once_it_was

        path = await pulled(tmp_path, image, trainer, peer, deadline=PATIENCE)

    assert path.read_bytes() == image.view
    assert list(tmp_path.iterdir()) == [path]


async def test_a_source_that_halts_for_a_moment_goes_on_when_the_other_one_is_slower(
    image: WeightImage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_halted = threading.Event()

    def halting_once(image: WeightImage, connection: socket.socket, span: range) -> None:
        if not has_halted.is_set():
            has_halted.set()
            connection.recv(1)  # until the other side ends
        slowly(image, connection, span)

    async with sources(monkeypatch, image, image) as (trainer, peer):
        peer.send, trainer.send = halting_once, by_drops

        path = await pulled(tmp_path, image, trainer, peer, deadline=PATIENCE)

    assert path.read_bytes() == image.view
    assert trainer.spans and len(peer.spans) > 1


async def test_a_source_has_all_of_the_time_from_its_first_byte_on(tmp_path: Path) -> None:
    arriving, stopped = ArrivingImage(tmp_path, None), asyncio.Event()
    began = 0.0

    class Nothing:
        num_received = 0

        def stop(self) -> None:
            stopped.set()

    @dataclass(eq=False)
    class Late:
        url: str = "late"
        is_origin: bool = False
        strikes: int = 0
        failure: FlotillaError | None = None

        async def fetch(self, arriving: ArrivingImage, arrival: Arrival) -> None:
            nonlocal began
            await asyncio.sleep(0.5)
            began, arrival.stream = time.monotonic(), Nothing()
            await stopped.wait()

    late = Late()
    span = await arriving.next_range(late, 0.01, 0.3)
    assert span is not None
    taking = asyncio.create_task(arriving.take(late, span))
    looking = asyncio.create_task(arriving.next_range(Late("idle"), 0.01, 0.3))
    await asyncio.wait([looking])
    await taking

    assert time.monotonic() - began >= 0.3
    assert looking.result() == span


async def test_a_source_that_dies_is_left_and_what_it_sent_is_kept(
    image: WeightImage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_client, "STALL_SECONDS", DEADLINE)  # a busy machine is no stall
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


async def test_a_pull_leaves_half_of_the_cores_to_others(
    image: WeightImage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    write, writing, most = os.pwrite, [], 0

    def slow(file: int, data: memoryview, position: int) -> int:
        nonlocal most
        writing.append(position)
        most = max(most, len(writing))
        time.sleep(0.01)
        writing.remove(position)
        return write(file, data, position)

    monkeypatch.setattr(os, "pwrite", slow)
    async with sources(monkeypatch, image, image) as (trainer, peer):
        path = await pulled(tmp_path, image, trainer, peer)

    assert path.read_bytes() == image.view
    assert most == 1


async def test_on_loopback_a_range_that_has_begun_keeps_its_core(
    image: WeightImage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_quarters(image: WeightImage, connection: socket.socket, span: range) -> None:
        for start in range(span.start, span.stop, 1 << 18):
            connection.sendall(image.view[start : min(start + (1 << 18), span.stop)])
            time.sleep(0.02)

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(direct_module, "PAUSE_SECONDS", PATIENCE)
    write, written = os.pwrite, list[int]()

    def noted(file: int, data: memoryview, position: int) -> int:
        written.append(position >> 20)
        return write(file, data, position)

    monkeypatch.setattr(os, "pwrite", noted)
    async with sources(monkeypatch, image) as (trainer,):
        trainer.send = by_quarters
        path = await pulled(tmp_path, image, trainer)

    assert path.read_bytes() == image.view
    assert len(written) > 2 * SIZE
    assert len([each for each, _ in itertools.groupby(written)]) == len(set(written))


async def test_who_reads_an_image_as_it_arrives_hears_of_it_within_a_range(
    image: WeightImage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_client, "CONNECTIONS", 1)
    half, told, is_told = 1 << 19, list[int](), threading.Event()

    def on_arrived(path: Path, num_bytes: int) -> None:
        told.append(num_bytes)
        if half // 2 <= num_bytes < 2 * half:  # the last bytes that came may be too few to be woken for
            is_told.set()

    def in_halves(image: WeightImage, connection: socket.socket, span: range) -> None:
        middle = span.start + half
        connection.sendall(image.view[span.start : middle])
        if span.start == 0:
            is_told.wait(PATIENCE / 10)
        connection.sendall(image.view[middle : span.stop])

    async with sources(monkeypatch, image) as (trainer,):
        trainer.send = in_halves
        pull = WeightPuller(Credentials(TOKEN))
        await pull(trainer.url, 3, tmp_path, DEADLINE, checksum=image.checksum(), on_arrived=on_arrived)

    assert is_told.is_set()
    assert told == sorted(told)
    assert told[-1] == image.image_bytes


async def test_without_a_checksum_only_the_trainer_is_asked(
    image: WeightImage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sources(monkeypatch, image, image) as (trainer, peer):
        pull = WeightPuller(Credentials(TOKEN))
        path = await pull(trainer.url, 3, tmp_path, DEADLINE, peers=[peer.url])

    assert path.read_bytes() == image.view
    assert peer.spans == []
