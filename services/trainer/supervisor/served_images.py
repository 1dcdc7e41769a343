"""The images that this service offers to be pulled, held so that the worker does not write into them."""

import asyncio
import logging
from contextlib import AbstractContextManager
from pathlib import Path

from flotilla.shared.errors import WeightTransferFailed
from flotilla.shared.weights.image.files import sweep
from flotilla.shared.weights.image.image import WeightImage
from flotilla.shared.weights.image.off_loop import attach_image, close_images, map_again
from flotilla.shared.weights.pull.kept_images import KeptImages
from flotilla.shared.weights.pull.sender import ProcessSender, RangeSender
from flotilla.shared.weights.pull.server import PublishedImages

log = logging.getLogger(__name__)

WRITE_SECONDS = 5.0
"""An image that is being written when the experiment ends is waited for so long; then it is left to itself."""


class ServedImages:
    """The newest versions, each under a shared lock while it is offered.

    They outlive the worker that wrote them: a rollout that joins while the worker is started again still gets them.

    Args:
        published: what the pull route serves.
        sender: moves their bytes; None has a process do it.
    """

    def __init__(self, published: PublishedImages, sender: RangeSender | None = None) -> None:
        self._published = published
        self._sender = sender or ProcessSender()
        self._held: dict[int, WeightImage] = {}
        self._kept: KeptImages | None = None
        self._writing: asyncio.Task[None] | None = None
        self._to_write: tuple[int, str] | None = None

    def served_directly(self, host: str) -> AbstractContextManager[None]:
        """Send them over plain connections too, while the block runs."""
        return self._published.served_directly(host, self._sender)

    def keep_in(self, directory: Path | None) -> None:
        """Write the versions that are offered from now on to a directory, too."""
        self._kept = None if directory is None else KeptImages(directory, self._sender)

    async def offer(self, version: int, path: Path, checksum: str) -> None:
        """Offer a version; the oldest one is released."""
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
        self._to_write = (version, checksum)
        if self._kept is not None and (self._writing is None or self._writing.done()):
            self._writing = asyncio.create_task(self._write(self._kept), name="images into the directory")

    async def withdraw(self, *, is_over: bool = False) -> None:
        """Release all images, and remove those whose worker is dead; if no trainer continues, those on disk as well."""
        images = list(self._held.values())
        self._held.clear()
        self._published.withdraw()
        kept, self._kept, self._to_write = self._kept, None, None
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=WRITE_SECONDS)
        await close_images(*images)
        if kept is not None and is_over:
            await asyncio.to_thread(kept.clear)
        await asyncio.to_thread(sweep)

    async def _write(self, kept: KeptImages) -> None:
        """Write the newest version until none is newer: one that is replaced while another is written is left out."""
        while self._to_write is not None:
            (version, checksum), self._to_write = self._to_write, None
            try:
                image = await map_again(self._held[version])
            except (KeyError, WeightTransferFailed):
                continue  # It is offered no more.
            try:
                await asyncio.to_thread(kept.write, version, checksum, image)
            except OSError as error:
                log.warning("image cannot be kept on disk", extra={"version": version, "cause": repr(error)})
            finally:
                await close_images(image)
