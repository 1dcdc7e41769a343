"""A pull that meets a server in a bad moment: it is asked again, and nothing of the rollout ends with it."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from flotilla.shared.errors import NotFound
from flotilla.shared.net.authorisation.tokens import Credentials
from flotilla.shared.weights.image.image import WeightImage
from flotilla.shared.weights.image.layout import ImageLayout
from flotilla.shared.weights.pull import client as pull_client
from flotilla.shared.weights.pull.client import WeightPuller
from flotilla.shared.weights.pull.http_source import HttpSource
from flotilla.shared.weights.pull.server import PublishedImages

MISSING = {"code": "not_found", "title": "There is no such thing", "status": 404, "detail": "version 1 is not offered"}


async def test_an_image_that_was_let_go_of_before_it_is_mapped_again_is_not_offered(tmp_path: Path) -> None:
    images = PublishedImages()
    image = WeightImage.create(4096, directory=tmp_path)
    images.publish(1, image, "0" * 16)
    image.close()  # a newer version took its place while a thread was about to map it

    with pytest.raises(NotFound, match="version 1 is not offered"):
        await images.open(1)


async def test_a_server_that_fails_within_is_asked_again(tmp_path: Path) -> None:
    answers = [httpx.Response(500, text="Internal Server Error"), httpx.Response(404, json=MISSING)]
    pull = WeightPuller(Credentials("token"), transport=httpx.MockTransport(lambda _: answers.pop(0)))

    with pytest.raises(NotFound, match="version 1 is not offered"):
        await pull("http://trainer/v1/weights/1", 1, tmp_path, 20.0)

    assert not answers


async def test_a_pull_that_is_cancelled_at_its_end_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = WeightImage.create(4096, directory=tmp_path)
    content, tag = bytes(image.view), image.checksum()
    image.close()
    headers = {"etag": f'"{tag}"', "content-range": "bytes 0-4095/4096"}

    async def chunks() -> AsyncIterator[bytes]:
        yield content

    answer = httpx.MockTransport(lambda _: httpx.Response(206, content=chunks(), headers=headers))
    pull = WeightPuller(Credentials("token"), transport=answer)
    has_begun, may_end = threading.Event(), threading.Event()

    def finish(image: WeightImage) -> Path:
        path = hand_over(image)
        has_begun.set()
        may_end.wait(5)
        return path

    hand_over = WeightImage.hand_over
    monkeypatch.setattr(WeightImage, "layout", lambda _: None)
    monkeypatch.setattr(WeightImage, "hand_over", finish)
    pulling = asyncio.create_task(pull("http://trainer/v1/weights/1", 1, tmp_path, 20.0))
    assert await asyncio.to_thread(has_begun.wait, 5)

    pulling.cancel()
    asyncio.get_running_loop().call_later(0.05, may_end.set)
    with pytest.raises(asyncio.CancelledError):
        await pulling

    assert list(tmp_path.iterdir()) == []


HALF, WHOLE = 2048, 4096
LIES = {
    "larger": {"content-range": f"bytes 0-{2 * WHOLE - 1}/{2 * WHOLE}"},
    "smaller": {"content-range": f"bytes 0-{HALF - 1}/{HALF}"},
    "empty": {"content-range": "bytes 0-0/0"},
    "more than any disk has": {"content-range": f"bytes 0-33554431/{'9' * 18}"},
    "a number of many digits": {"content-range": f"bytes 0-1/{'9' * 5000}"},
    "no ticket": {"flotilla-ticket": "nonsense", "flotilla-port": "1"},
    "a short ticket": {"flotilla-ticket": "ab", "flotilla-port": "1"},
    "no port": {"flotilla-ticket": "0" * 64, "flotilla-port": "x" * 9},
    "a port without end": {"flotilla-ticket": "0" * 64, "flotilla-port": "9" * 5000},
    "no such port": {"flotilla-ticket": "0" * 64, "flotilla-port": "99999"},
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("is_direct", [False, True], ids=["asked for bytes", "asked for a ticket"])
async def test_a_rollout_that_lies_in_its_head_costs_nobody_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: str, is_direct: bool
) -> None:
    layout = ImageLayout.of({"weight": ((WHOLE - 64 - 64,), "U8")})
    with WeightImage.create(layout.image_bytes, directory=tmp_path) as image:
        image.write_from(layout, [bytes(WHOLE - 128)])
        content, tag = bytes(image.view), image.checksum()
    has_lied = asyncio.Event()

    async def answer(request: httpx.Request) -> httpx.Response:
        if request.url.host == "trainer":
            await has_lied.wait()
            head = {"content-range": f"bytes 0-{len(content) - 1}/{len(content)}", "etag": f'"{tag}"'}
            return httpx.Response(206, content=chunks(content), headers=head)
        has_lied.set()
        head = {"content-range": f"bytes 0-{len(content) - 1}/{len(content)}", "etag": f'"{tag}"'} | LIES[lie]
        return httpx.Response(206, content=chunks(bytes(len(content))), headers=head)

    async def chunks(body: bytes) -> AsyncIterator[bytes]:
        yield body

    made = HttpSource.__init__

    def source(self: HttpSource, *args: Any, **facts: Any) -> None:
        made(self, *args, **facts)
        self.may_be_direct = is_direct

    monkeypatch.setattr(HttpSource, "__init__", source)
    pull = WeightPuller(Credentials("token"), transport=httpx.MockTransport(answer))

    path = await pull(
        "http://trainer/v1/weights/1", 1, tmp_path, 20.0, checksum=tag, peers=["http://peer/v1/weights/1"]
    )

    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


async def test_a_body_that_comes_by_drops_is_left_for_another_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_client, "STALL_SECONDS", 0.2)
    monkeypatch.setattr(pull_client, "LOOK_SECONDS", 0.05)
    layout = ImageLayout.of({"weight": ((WHOLE,), "U8")})
    with WeightImage.create(layout.image_bytes, directory=tmp_path) as image:
        image.write_from(layout, [bytes(range(256)) * (WHOLE // 256)])
        content, tag = bytes(image.view), image.checksum()
    has_begun = asyncio.Event()

    async def drops(start: int) -> AsyncIterator[bytes]:
        for position in range(start, len(content)):
            yield content[position : position + 1]
            has_begun.set()
            await asyncio.sleep(0.02)

    async def whole(start: int) -> AsyncIterator[bytes]:
        yield content[start:]

    async def answer(request: httpx.Request) -> httpx.Response:
        start = int(request.headers["range"].removeprefix("bytes=").partition("-")[0])
        head = {"content-range": f"bytes {start}-{len(content) - 1}/{len(content)}", "etag": f'"{tag}"'}
        if request.url.host == "peer":
            return httpx.Response(206, content=drops(start), headers=head)
        await has_begun.wait()
        return httpx.Response(206, content=whole(start), headers=head)

    pull = WeightPuller(Credentials("token"), transport=httpx.MockTransport(answer))
    path = await asyncio.wait_for(
        pull("http://trainer/v1/weights/1", 1, tmp_path, 60.0, checksum=tag, peers=["http://peer/v1/weights/1"]), 20
    )

    assert path.read_bytes() == content
