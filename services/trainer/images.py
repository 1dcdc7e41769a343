"""Snapshots of the weights in shared memory: one is served while the next is written."""

import time
from pathlib import Path

from shared.errors import Conflict, WeightTransferFailed
from shared.schemas.publication import Manifest
from shared.weights.flat_parameters import FlatParameters
from shared.weights.image import WeightImage

MAX_IMAGES = 4
FREE_SECONDS = 30.0
PAUSE_SECONDS = 0.02


class ImagePool:
    """A few images of one layout, used in turn. An image that somebody still reads is not touched.

    Args:
        flat: the weights that are copied.
        directory: where images lie; None chooses shared memory where there is room.
    """

    def __init__(self, flat: FlatParameters, *, directory: Path | None = None) -> None:
        self._flat = flat
        self._directory = directory
        self._images: list[WeightImage] = []
        self._newest: WeightImage | None = None

    def snapshot(self) -> Path:
        """Copy the present weights into an image that nobody reads, never the newest one; blocks.

        Raises:
            WeightTransferFailed: all images are being read, or there is no room for one.
        """
        end = time.monotonic() + FREE_SECONDS
        while True:
            for image in self._images:
                if image is not self._newest and self._write(image):
                    return image.path
            if len(self._images) < MAX_IMAGES:
                self._images.append(WeightImage.create(self._flat.layout.image_bytes, directory=self._directory))
                continue
            if time.monotonic() > end:
                raise WeightTransferFailed(f"{MAX_IMAGES} weight images are all being read for {FREE_SECONDS:g} s")
            time.sleep(PAUSE_SECONDS)

    def manifest(self, path: Path, version: int) -> Manifest:
        """Describe an image; reads all of it once, for the checksum."""
        image = next(image for image in self._images if image.path == path)
        return image.manifest(version)

    def close(self) -> None:
        """Remove all images; whoever has one open keeps it."""
        for image in self._images:
            image.close()
        self._images.clear()
        self._newest = None

    def _write(self, image: WeightImage) -> bool:
        try:
            self._flat.snapshot_into(image)
        except Conflict:
            return False
        self._newest = image
        # Oldest first the next time.
        self._images.remove(image)
        self._images.append(image)
        return True
