"""Images that stay mapped from one version to the next.

Making a process know the pages of an image takes as long as receiving them: a fresh mapping halves the speed of a
broadcast over loopback. A kept mapping holds no lock, so it does not block writers; a lock is held only in use.
"""

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flotilla.shared.errors import WeightTransferFailed
from flotilla.shared.weights.image.image import WeightImage


class KeptMappings:
    """Mappings of other processes' images by path. One use at a time: threads wait for each other."""

    def __init__(self) -> None:
        self._images: dict[Path, WeightImage] = {}
        self._using = threading.Lock()

    @contextmanager
    def use(self, *images: tuple[Path, int]) -> Iterator[list[mmap.mmap]]:
        """Map these images, each given with the size that it must have, locked against writers for the while.

        Raises:
            WeightTransferFailed: one is missing, withdrawn, being written, or of another size.
        """
        with self._using:
            self._forget_withdrawn()
            used = []
            try:
                for path, image_bytes in images:
                    image = self._image(path)
                    image.lock()
                    used.append(image)
                    if image.image_bytes != image_bytes:
                        raise WeightTransferFailed(
                            f"the image has {image.image_bytes} bytes, the manifest says {image_bytes}"
                        )
                yield [image.mapped for image in used]
            finally:
                for image in used:
                    image.unlock()

    def close(self) -> None:
        """Release all mappings."""
        with self._using:
            for image in self._images.values():
                image.close()
            self._images.clear()

    def _image(self, path: Path) -> WeightImage:
        if path not in self._images:
            self._images[path] = WeightImage.attach(path)
        return self._images[path]

    def _forget_withdrawn(self) -> None:
        for path, image in list(self._images.items()):
            if image.is_withdrawn:
                self._images.pop(path).close()
