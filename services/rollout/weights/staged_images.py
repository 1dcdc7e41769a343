"""The images that a rollout keeps in memory besides the weights that its engine serves.

Its own ones are received into; those of a trainer on this host are mapped, which copies nothing. A mapped image is held
against being written while it waits to be served or is being loaded, and no longer. The file of any of them may vanish
at any time: an image without one is of no use to the engine, which has a process of its own.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from flotilla.shared.errors import Conflict, WeightTransferFailed
from flotilla.shared.weights.image.image import WeightImage
from flotilla.shared.weights.image.off_loop import attach_image, close_images, create_image
from flotilla.shared.weights.pull.server import PublishedImages

NUM_IMAGES = 4
"""One that is being received, the one that it is a patch for, one that waits to be served, one that is being loaded."""


@dataclass(frozen=True, slots=True)
class StagedImage:
    """A complete image that waits to be served."""

    version: int
    checksum: str
    image: WeightImage

    def is_of(self, version: int, checksum: str | None) -> bool:
        """Return whether it is what a version was committed as; two trainers may have made an image each for it.

        Args:
            version: the committed version.
            checksum: of its image; None if it is not known.
        """
        return self.version == version and checksum in {None, self.checksum}


class StagedImages:
    """Images by their use: at most one is staged, any other is free unless it is in use, or read by others.

    Args:
        published: where the staged image is offered to other rollouts, if it is an own one.
    """

    def __init__(self, published: PublishedImages | None = None) -> None:
        self._published = published
        self._own: list[WeightImage] = []
        self._mapped: dict[Path, WeightImage] = {}
        self._attaching = asyncio.Lock()
        self._in_use: list[WeightImage] = []
        self._lent: WeightImage | None = None
        self.staged: StagedImage | None = None

    @asynccontextmanager
    async def own(self, image_bytes: int) -> AsyncIterator[WeightImage]:
        """Use an image of this size that holds nothing of worth.

        Raises:
            WeightTransferFailed: there is no room for one.
        """
        with self.using(await self._free(image_bytes)) as image:
            yield image

    @asynccontextmanager
    async def mapped(self, path: Path, image_bytes: int) -> AsyncIterator[WeightImage]:
        """Use the image of a trainer on this host, held against being written.

        Raises:
            WeightTransferFailed: it is missing, withdrawn, being written, or of another size.
        """
        withdrawn = [each for each, image in self._mapped.items() if image.is_withdrawn and not self._is_wanted(image)]
        await close_images(*(self._mapped.pop(each) for each in withdrawn))
        async with self._attaching:  # a publication and the switch to a missed version may want the same one at once
            if path not in self._mapped:
                self._mapped[path] = await attach_image(path)
        image = self._mapped[path]
        image.lock()
        with self.using(image):
            if image.image_bytes != image_bytes:
                raise WeightTransferFailed(f"the image has {image.image_bytes} bytes, the manifest says {image_bytes}")
            yield image

    @contextmanager
    def using(self, image: WeightImage) -> Iterator[WeightImage]:
        """Keep an image from being written or released while the block runs."""
        self._in_use.append(image)
        try:
            yield image
        finally:
            self._in_use.remove(image)
            self._release(image)

    def keep(self, staged: StagedImage | None) -> None:
        """Let this image wait to be served, in place of the one that did."""
        replaced, self.staged = self.staged, staged
        if self._published is not None:
            self._published.withdraw()
            if staged is not None and staged.image.is_owner:
                self._published.publish(staged.version, staged.image, staged.checksum)
        if replaced is not None:
            self._release(replaced.image)

    def give_away(self, image_bytes: int) -> WeightImage | None:
        """Lend an own image of this size that is unused, to be overwritten; None if there is none.

        Its memory was touched before, which is most of what writing into a new one costs. One is lent at a time.
        """
        if self._lent is not None and not self._lent.is_closed:
            return None
        for image in self._own:
            if not self._is_wanted(image) and image.image_bytes == image_bytes:
                with suppress(Conflict):
                    image.take_back()
                    self._own.remove(image)
                    self._lent = image
                    return image
        return None

    async def adopt(self, path: Path) -> WeightImage:
        """Take a complete image file over as an own one.

        Raises:
            WeightTransferFailed: there is none.
        """
        free = [image for image in self._own if not self._is_wanted(image)]
        self._own = [image for image in self._own if image not in free]
        lent = self._lent
        if lent is not None and lent.path == path and not lent.is_closed:
            # Still mapped: the next pull into it need not find its pages again.
            image, self._lent = lent, None
            image.own_again()
        else:
            # The engine reads it, in a process of its own; here it is sent by its descriptor.
            try:
                image = await attach_image(path, is_read_whole=False)
            except asyncio.CancelledError:
                _remove(path)
                raise
            image.is_owner = True
        self._own.append(image)
        with self.using(image):
            await close_images(*free)
        return image

    async def close(self) -> None:
        """Delete its own images and release the others."""
        images = [*self._own, *self._mapped.values(), *([] if self._lent is None else [self._lent])]
        self.keep(None)
        self._own.clear()
        self._mapped.clear()
        await close_images(*images)

    async def _free(self, image_bytes: int) -> WeightImage:
        free = [image for image in self._own if not self._is_wanted(image)]
        fitting = [
            image
            for image in free
            if image.image_bytes == image_bytes and not image.is_withdrawn and not image.is_read_by_others
        ]
        others = [image for image in free if image not in fitting]
        self._own = [image for image in self._own if image not in others]
        await close_images(*others)
        if fitting:
            return fitting[0]
        assert len(self._own) < NUM_IMAGES, "every image is in use"
        image = await create_image(image_bytes)
        self._own.append(image)
        return image

    def _is_wanted(self, image: WeightImage) -> bool:
        return image in self._in_use or (self.staged is not None and self.staged.image is image)

    def _release(self, image: WeightImage) -> None:
        if not image.is_owner and not image.is_closed and not self._is_wanted(image):
            image.unlock()


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
