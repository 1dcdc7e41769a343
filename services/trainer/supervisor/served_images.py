"""The images that this service offers to be pulled, held so that the worker does not write into them."""

import asyncio
import logging
from contextlib import AbstractContextManager
from pathlib import Path

from shared.errors import WeightTransferFailed
from shared.weights.image import WeightImage, sweep
from shared.weights.off_loop import attach_image, close_images
from shared.weights.pull import PublishedImages

log = logging.getLogger(__name__)


class ServedImages:
    """The newest versions, each under a shared lock while it is offered.

    They outlive the worker that wrote them: a rollout that joins while the worker is started again still gets them.

    Args:
        published: what the pull route serves.
    """

    def __init__(self, published: PublishedImages) -> None:
        self._published = published
        self._held: dict[int, WeightImage] = {}

    def served_directly(self, host: str) -> AbstractContextManager[None]:
        """Send them over plain connections too, while the block runs."""
        return self._published.served_directly(host)

    async def offer(self, version: int, path: Path, checksum: str) -> None:
        """Offer a version; the oldest one is let go."""
        try:
            image = await attach_image(path)
        except WeightTransferFailed as error:
            log.warning("image cannot be offered", extra={"version": version, "error": error.detail})
            return
        replaced = [self._held.pop(version)] if version in self._held else []
        self._held[version] = image
        self._published.publish(version, image, checksum)
        old = [each for each in self._held if each not in self._published.versions]
        await close_images(*replaced, *(self._held.pop(each) for each in old))

    async def withdraw(self) -> None:
        """Let go of all images, and remove those whose worker is dead."""
        images = list(self._held.values())
        self._held.clear()
        self._published.withdraw()
        await close_images(*images)
        await asyncio.to_thread(sweep)
