"""Weight images as an event loop uses them: reserving, mapping and freeing gigabytes takes seconds, each on a thread.

A service that did it on its event loop would miss heartbeats, and lose its lease with the weights of a large model.
"""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

from flotilla.shared.weights.image.image import WeightImage


async def create_image(image_bytes: int, *, directory: Path | None = None, is_reserved: bool = True) -> WeightImage:
    """Reserve an image; see ``WeightImage.create``. A caller that is cancelled leaves none behind."""

    def create() -> WeightImage:
        return WeightImage.create(image_bytes, directory=directory, is_reserved=is_reserved)

    return await _made(create)


async def attach_image(path: Path, *, is_read_whole: bool = True) -> WeightImage:
    """Map an image that another process owns; see ``WeightImage.attach``."""
    return await _made(lambda: WeightImage.attach(path, is_read_whole=is_read_whole))


async def map_again(image: WeightImage) -> WeightImage:
    """Map an image once more; see ``WeightImage.again``."""
    return await _made(image.again)


async def close_images(*images: WeightImage) -> None:
    """Release images, and remove the files of own ones; it is done also when the caller is cancelled."""
    if images:
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, _close, images))


class _Making:
    """Makes an image on a thread; one that its caller abandoned meanwhile is closed by whichever side comes second."""

    def __init__(self, make: Callable[[], WeightImage]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: WeightImage | None = None
        self._is_given_up = False

    def run(self) -> WeightImage | None:
        """Make it, on the thread; None if it was cancelled."""
        image = self._make()
        with self._lock:
            if not self._is_given_up:
                self._made = image
                return image
        image.close()
        return None

    def give_up(self) -> WeightImage | None:
        """Want it no longer; gives the image if it is there already."""
        with self._lock:
            self._is_given_up = True
            return self._made


async def _made(make: Callable[[], WeightImage]) -> WeightImage:
    making = _Making(make)
    loop = asyncio.get_running_loop()
    try:
        image = await loop.run_in_executor(None, making.run)
    except asyncio.CancelledError:
        if (image := making.give_up()) is not None:
            loop.run_in_executor(None, image.close)
        raise
    assert image is not None
    return image


def _close(images: tuple[WeightImage, ...]) -> None:
    for image in images:
        image.close()
