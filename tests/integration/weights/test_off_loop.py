"""A service stays responsive while it reserves, maps and frees the images of a large model."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from flotilla.services.trainer.supervisor.served_images import ServedImages
from flotilla.shared.weights.image.files import SHARED_MEMORY
from flotilla.shared.weights.image.image import WeightImage
from flotilla.shared.weights.image.off_loop import attach_image, close_images, create_image
from flotilla.shared.weights.pull.server import PublishedImages

IMAGE_BYTES = 512 << 20
TRIES = 5
"""The machine may be busy elsewhere: one undisturbed try tells."""

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="there is no shared memory")


async def longest_standstill(work: Callable[[], Awaitable[object]]) -> tuple[float, float]:
    """Run ``work`` beside a ticking event loop: the longest time without a tick, and the whole time, in seconds."""
    started = last = time.perf_counter()
    longest = 0.0
    running = asyncio.ensure_future(work())
    while not running.done():
        await asyncio.sleep(0)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    await running
    return longest, time.perf_counter() - started


async def test_the_event_loop_goes_on_while_a_large_image_is_mapped() -> None:
    shares = []
    for _ in range(TRIES):
        image = await create_image(IMAGE_BYTES)
        mapped: list[WeightImage] = []
        try:
            longest, seconds = await longest_standstill(lambda path=image.path, to=mapped: _attach(path, to))
        finally:
            await close_images(image, *mapped)
        shares.append(longest / seconds)
        if shares[-1] < 0.5:
            return
    pytest.fail(f"the event loop stood still for these shares of the time: {shares}")


async def _attach(path: Path, mapped: list[WeightImage]) -> None:
    mapped.append(await attach_image(path))


async def test_a_cancelled_reservation_leaves_no_file() -> None:
    before = set(SHARED_MEMORY.glob("flotilla-weights-*"))
    reserving = asyncio.create_task(create_image(IMAGE_BYTES))
    async with asyncio.timeout(10):
        while not set(SHARED_MEMORY.glob("flotilla-weights-*")) - before:
            await asyncio.sleep(0)
        reserving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reserving

        while set(SHARED_MEMORY.glob("flotilla-weights-*")) - before:
            await asyncio.sleep(0.01)


async def test_offered_images_are_mapped_and_let_go_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [WeightImage.create(64, directory=tmp_path) for _ in range(4)]
    on_loop: list[str] = []

    def watch(name: str) -> None:
        original = getattr(WeightImage, name)

        def watched(*args: object, **keywords: object) -> object:
            if asyncio._get_running_loop() is not None:
                on_loop.append(name)
            return original(*args, **keywords)

        monkeypatch.setattr(WeightImage, name, watched)

    watch("attach")
    watch("close")
    served = ServedImages(PublishedImages())
    for version, image in enumerate(images):
        await served.offer(version, image.path, "c")
    await served.withdraw()
    monkeypatch.undo()
    for image in images:
        with image.writing():
            pass
        image.close()

    assert on_loop == []
