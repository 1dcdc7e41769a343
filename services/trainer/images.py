"""Snapshots of the weights in shared memory: one is served while the next is written.

Rollouts on this host map them, others pull them. Whoever reads one for long keeps it, but cannot keep training waiting:
its file is withdrawn, and its memory is free when the last reader lets go.
"""

import logging
import time
from pathlib import Path

from shared.errors import Conflict
from shared.schemas.publication import Manifest
from shared.weights.flat_parameters import FlatParameters
from shared.weights.image import DEFAULT_SLICE_BYTES, WeightImage

log = logging.getLogger(__name__)

MAX_IMAGES = 4
PATIENCE_SECONDS = 1.0
"""Readers of an old image may take this long before it is withdrawn."""
PAUSE_SECONDS = 0.02


class ImagePool:
    """A few images of one layout, used in turn. An image that somebody still reads is not touched.

    Args:
        flat: the weights that are copied.
        directory: where images lie; None chooses shared memory where there is room.
        slice_bytes: size of one broadcast.
    """

    def __init__(
        self, flat: FlatParameters, *, directory: Path | None = None, slice_bytes: int = DEFAULT_SLICE_BYTES
    ) -> None:
        self._flat = flat
        self._slice_bytes = slice_bytes
        self._directory = directory
        self._images: list[WeightImage] = []
        self._newest: WeightImage | None = None

    def snapshot(self) -> Path:
        """Copy the present weights into an image that nobody reads, never the newest one; blocks.

        Raises:
            WeightTransferFailed: there is no room for one.
        """
        end = time.monotonic() + PATIENCE_SECONDS
        while True:
            for image in self._images:
                if image is not self._newest and self._write(image):
                    return image.path
            if len(self._images) < MAX_IMAGES:
                self._images.append(WeightImage.create(self._flat.layout.image_bytes, directory=self._directory))
                continue
            if time.monotonic() > end:
                self._withdraw_oldest()
            else:
                time.sleep(PAUSE_SECONDS)

    def manifest(self, path: Path, version: int) -> Manifest:
        """Describe an image; reads all of it once, for the checksum."""
        image = next(image for image in self._images if image.path == path)
        return image.manifest(version, self._slice_bytes).model_copy(update={"image_path": str(path)})

    def close(self) -> None:
        """Remove all images; whoever has one open keeps it."""
        for image in self._images:
            image.close()
        self._images.clear()
        self._newest = None

    def _withdraw_oldest(self) -> None:
        oldest = next(image for image in self._images if image is not self._newest)
        log.warning("image is still being read, another takes its place", extra={"image": oldest.path.name})
        self._images.remove(oldest)
        oldest.close()

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
