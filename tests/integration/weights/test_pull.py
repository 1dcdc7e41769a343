"""Weights over HTTP: whole, in parts, after interruptions; never wrong and never half."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flotilla.shared.errors import Conflict, DeadlineExceeded, NotFound, Unauthorized, Unavailable, WeightTransferFailed
from flotilla.shared.net.authorisation.tokens import Credentials
from flotilla.shared.weights.image.image import WeightImage
from flotilla.shared.weights.image.tensors import open_image
from flotilla.shared.weights.pull.client import WeightPuller
from flotilla.shared.weights.pull.server import PublishedImages, weights_router
from flotilla.shared.weights.pull.source import RANGE_BYTES
from tests.integration.weights.processes import an_image

TOKEN = "correct horse"
DEADLINE = 20.0
FIRST_RANGE = f"bytes=0-{RANGE_BYTES - 1}"


@pytest.fixture
def image() -> Iterator[WeightImage]:
    with an_image(num_megabytes=4) as made:
        yield made


@dataclass
class Faults:
    """What goes wrong between the server and its clients."""

    app: ASGIApp
    cut_after_bytes: list[int] = field(default_factory=list)
    """One entry per answer: how much of its body is sent before the connection breaks."""
    on_cut: Callable[[], None] = lambda: None
    flip: bool = False
    stall: bool = False
    ranges: list[str | None] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.ranges.append(headers.get("range"))
        budget = self.cut_after_bytes.pop(0) if self.cut_after_bytes else None
        num_sent = 0

        async def faulty(message: Message) -> None:
            nonlocal num_sent
            body = message.get("body", b"")
            if self.flip and body:
                message["body"] = bytes([body[0] ^ 1]) + body[1:]
            num_sent += len(body)
            if self.stall and num_sent:
                await asyncio.sleep(DEADLINE)
            if budget is not None and num_sent > budget:
                self.on_cut()
                raise ConnectionAbortedError("cut by the test")
            await send(message)

        with contextlib.suppress(ConnectionAbortedError):
            await self.app(scope, receive, faulty)


@dataclass(frozen=True)
class Server:
    """A server of images, and its address."""

    images: PublishedImages
    faults: Faults
    address: str

    def url(self, version: int) -> str:
        return f"{self.address}/v1/weights/{version}"


@asynccontextmanager
async def a_server() -> AsyncIterator[Server]:
    images = PublishedImages()
    app = FastAPI()
    app.include_router(weights_router(images, Credentials(TOKEN)))
    faults = Faults(app)
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(faults, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    yield Server(images, faults, f"http://127.0.0.1:{listening.getsockname()[1]}")
    server.should_exit = True
    await serving


async def test_a_pulled_image_is_the_published_one(image: WeightImage, tmp_path: Path) -> None:
    async with a_server() as server:
        server.images.publish(3, image.path)

        path = await WeightPuller(Credentials(TOKEN))(server.url(3), 3, tmp_path, DEADLINE)

    assert path.read_bytes() == image.view
    assert list(tmp_path.iterdir()) == [path]
    assert open_image(path)["bias"].shape == (7,)


async def test_a_pull_goes_into_an_image_that_is_free(image: WeightImage, tmp_path: Path) -> None:
    with an_image(num_megabytes=4, seed=1) as other:
        path = tmp_path / "old.safetensors"
        path.write_bytes(other.view)
    old = WeightImage.attach(path)
    old.is_owner = True
    inode = path.stat().st_ino
    asked: list[int] = []

    def reuse(image_bytes: int) -> WeightImage:
        asked.append(image_bytes)
        old.take_back()
        return old

    async with a_server() as server:
        server.images.publish(3, image.path)
        server.faults.cut_after_bytes = [1_500_000]

        pulled = await WeightPuller(Credentials(TOKEN))(server.url(3), 3, tmp_path, DEADLINE, reuse=reuse)

    assert pulled.read_bytes() == image.view
    assert (pulled.stat().st_ino, asked) == (inode, [image.image_bytes])
    assert list(tmp_path.iterdir()) == [pulled]
    old.own_again()
    old.close()


async def test_a_free_image_is_gone_when_the_pull_into_it_fails(image: WeightImage, tmp_path: Path) -> None:
    old = WeightImage.create(image.image_bytes, directory=tmp_path)

    def reuse(image_bytes: int) -> WeightImage:
        old.take_back()
        return old

    async with a_server() as server:
        server.images.publish(3, image.path)
        server.faults.flip = True

        with pytest.raises(WeightTransferFailed, match="checksum"):
            await WeightPuller(Credentials(TOKEN))(server.url(3), 3, tmp_path, DEADLINE, reuse=reuse)

    assert list(tmp_path.iterdir()) == []


async def test_a_pull_that_breaks_off_goes_on_where_it_stopped(image: WeightImage, tmp_path: Path) -> None:
    async with a_server() as server:
        server.images.publish(3, image.path)
        server.faults.cut_after_bytes = [2_500_000, 0, 1_200_000]

        path = await WeightPuller(Credentials(TOKEN))(server.url(3), 3, tmp_path, DEADLINE)

        assert path.read_bytes() == image.view
        assert server.faults.ranges[0] == FIRST_RANGE
        assert len(server.faults.ranges) == 4
        starts = [int(each.removeprefix("bytes=").partition("-")[0]) for each in server.faults.ranges[1:]]
        assert 0 < starts[0] == starts[1] < starts[2] < image.image_bytes


async def test_a_version_published_anew_is_pulled_from_its_beginning(image: WeightImage, tmp_path: Path) -> None:
    async with a_server() as server:
        server.images.publish(3, image.path)
        server.faults.cut_after_bytes = [2_500_000]
        with an_image(num_megabytes=4, seed=1) as other:
            server.faults.on_cut = lambda: server.images.publish(3, other.path)

            path = await WeightPuller(Credentials(TOKEN))(server.url(3), 3, tmp_path, DEADLINE)

            assert path.read_bytes() == other.view
        assert server.faults.ranges[-1] == FIRST_RANGE
    assert list(tmp_path.iterdir()) == [path]


async def test_bytes_that_changed_on_the_way_are_refused(image: WeightImage, tmp_path: Path) -> None:
    async with a_server() as server:
        server.images.publish(3, image.path)
        server.faults.flip = True

        with pytest.raises(WeightTransferFailed, match="checksum"):
            await WeightPuller(Credentials(TOKEN))(server.url(3), 3, tmp_path, DEADLINE)

    assert list(tmp_path.iterdir()) == []


async def test_a_version_that_is_not_offered_names_those_that_are(image: WeightImage, tmp_path: Path) -> None:
    async with a_server() as server:
        for version in (3, 4, 5):
            server.images.publish(version, image.path)

        with pytest.raises(NotFound, match="version 3 is not offered; available: 4, 5"):
            await WeightPuller(Credentials(TOKEN))(server.url(3), 3, tmp_path, DEADLINE)


async def test_a_version_whose_image_is_gone_is_not_offered(image: WeightImage, tmp_path: Path) -> None:
    async with a_server() as server:
        server.images.publish(3, image.path)
        image.close()

        with pytest.raises(NotFound, match="available: none"):
            await WeightPuller(Credentials(TOKEN))(server.url(3), 3, tmp_path, DEADLINE)


async def test_a_wrong_token_is_refused(image: WeightImage, tmp_path: Path) -> None:
    async with a_server() as server:
        server.images.publish(3, image.path)

        with pytest.raises(Unauthorized):
            await WeightPuller(Credentials("wrong"))(server.url(3), 3, tmp_path, DEADLINE)
        answer = await _get(server.url(3), Authorization="Basic abc")

    assert answer.status_code == 401
    assert answer.headers["content-type"] == "application/problem+json"


async def test_a_server_that_stalls_costs_one_deadline_and_leaves_no_file(image: WeightImage, tmp_path: Path) -> None:
    async with a_server() as server:
        server.images.publish(3, image.path)
        server.faults.stall = True

        with pytest.raises(DeadlineExceeded):
            await WeightPuller(Credentials(TOKEN))(server.url(3), 3, tmp_path, 0.5)

    assert list(tmp_path.iterdir()) == []


async def test_a_server_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="broke off"):
        await WeightPuller(Credentials(TOKEN))("http://127.0.0.1:1/v1/weights/1", 1, tmp_path, 0.5)


async def test_a_range_is_served_and_one_behind_the_end_is_refused(image: WeightImage) -> None:
    size = image.image_bytes
    async with a_server() as server:
        server.images.publish(3, image.path)

        middle = await _get(server.url(3), Range="bytes=10-19")
        beyond = await _get(server.url(3), Range=f"bytes={size}-")
        other = await _get(server.url(3), **{"Range": "bytes=10-19", "If-Range": '"another"'})

    assert (middle.status_code, middle.content) == (206, bytes(image.view[10:20]))
    assert middle.headers["content-range"] == f"bytes 10-19/{size}"
    assert middle.headers["etag"] == f'"{image.checksum()}"'
    assert (beyond.status_code, beyond.headers["content-range"]) == (416, f"bytes */{size}")
    assert (other.status_code, len(other.content)) == (200, size)


async def test_an_image_cannot_be_written_while_it_is_served(image: WeightImage) -> None:
    async with a_server() as server:
        server.images.publish(3, image.path)
        server.faults.stall = True
        serving = asyncio.create_task(_get(server.url(3)))
        while not server.faults.ranges:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.1)

        with pytest.raises(Conflict), image.writing():
            pass

        serving.cancel()
        await asyncio.wait([serving])


async def _get(url: str, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.get(url, headers={"Authorization": f"Bearer {TOKEN}"} | headers)
