"""A pull that meets a server in a bad moment: it is asked again, and nothing of the rollout ends with it."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from shared.credentials import Credentials
from shared.errors import NotFound
from shared.weights.image import WeightImage
from shared.weights.pull import PublishedImages
from shared.weights.pull_client import WeightPuller

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
