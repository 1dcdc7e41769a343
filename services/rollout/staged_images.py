"""The images that a rollout keeps in memory besides the weights that its engine serves.

Its own ones are received into; those of a trainer on this host are mapped, which copies nothing. A mapped image is held
against being written while it waits to be served or is being loaded, and no longer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shared.errors import WeightTransferFailed
from shared.weights.image import WeightImage

NUM_IMAGES = 4
"""One that is being received, the one that it is a patch for, one that waits to be served, one that is being loaded."""


@dataclass(frozen=True, slots=True)
class Spare:
    """A complete image that waits to be served."""

    version: int
    checksum: str
    image: WeightImage


class StagedImages:
    """Images by their use: at most one waits as the spare, any other is free unless it is in use."""

    def __init__(self) -> None:
        self._own: list[WeightImage] = []
        self._mapped: dict[Path, WeightImage] = {}
        self._in_use: list[WeightImage] = []
        self.spare: Spare | None = None

    @contextmanager
    def own(self, image_bytes: int) -> Iterator[WeightImage]:
        """Use an image of this size that holds nothing of worth.

        Raises:
            WeightTransferFailed: there is no room for one.
        """
        with self.using(self._free(image_bytes)) as image:
            yield image

    @contextmanager
    def mapped(self, path: Path, image_bytes: int) -> Iterator[WeightImage]:
        """Use the image of a trainer on this host, held against being written.

        Raises:
            WeightTransferFailed: it is missing, withdrawn, being written, or of another size.
        """
        for known, image in list(self._mapped.items()):
            if image.is_withdrawn and not self._is_wanted(image):
                self._mapped.pop(known).close()
        if path not in self._mapped:
            self._mapped[path] = WeightImage.attach(path)
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

    def keep(self, spare: Spare | None) -> None:
        """Let this image wait to be served, in place of the one that did."""
        replaced, self.spare = self.spare, spare
        if replaced is not None:
            self._release(replaced.image)

    def adopt(self, path: Path) -> WeightImage:
        """Take a complete image file over as an own one.

        Raises:
            WeightTransferFailed: there is none.
        """
        image = WeightImage.attach(path)
        image.is_owner = True
        self._own.append(image)
        return image

    def close(self) -> None:
        """Delete the own images and let go of the others."""
        self.spare = None
        for image in [*self._own, *self._mapped.values()]:
            image.close()
        self._own.clear()
        self._mapped.clear()

    def _free(self, image_bytes: int) -> WeightImage:
        for image in [each for each in self._own if not self._is_wanted(each)]:
            if image.image_bytes == image_bytes:
                return image
            self._own.remove(image)
            image.close()
        assert len(self._own) < NUM_IMAGES, "every image is in use"
        image = WeightImage.create(image_bytes)
        self._own.append(image)
        return image

    def _is_wanted(self, image: WeightImage) -> bool:
        return image in self._in_use or (self.spare is not None and self.spare.image is image)

    def _release(self, image: WeightImage) -> None:
        if not image.is_owner and not image.is_closed and not self._is_wanted(image):
            image.unlock()
