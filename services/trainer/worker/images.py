"""Snapshots of the weights in shared memory: one is served while the next is written.

Rollouts on this host map them, others pull them. A slow reader keeps its image, but does not delay training:
its file is withdrawn, and its memory is free when the last reader releases it.

For images of quantised weights a whole one is written beside them, and quantised one matrix at a time.
"""

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from flotilla.shared.config.sections.model import ModelConfig
from flotilla.shared.config.sections.publication import DeltaConfig
from flotilla.shared.errors import Conflict, WeightTransferFailed
from flotilla.shared.models.hub import model_directory
from flotilla.shared.models.weight_files import safetensors_files
from flotilla.shared.schemas.publication import DeltaManifest, Manifest
from flotilla.shared.weights.image.adapted import AdaptedDigests
from flotilla.shared.weights.image.adapters import BASE, AdaptersHeader
from flotilla.shared.weights.image.delta import changed_blocks, patch_bytes, write_patch
from flotilla.shared.weights.image.digests import of_image
from flotilla.shared.weights.image.image import DEFAULT_SLICE_BYTES, WeightImage
from flotilla.shared.weights.image.layout import ImageLayout
from flotilla.shared.weights.image.quantised import (
    Dequantised,
    Quantisation,
    layout_of_quantised,
    quantise,
    quantised_specs,
)
from flotilla.shared.weights.image.tensors import view_of

log = logging.getLogger(__name__)


class Snapshots(Protocol):
    """Weights that can be copied into an image."""

    @property
    def layout(self) -> ImageLayout:
        """Of the image."""

    def snapshot_into(self, image: WeightImage) -> None:
        """Write header and weights; blocks.

        Raises:
            Conflict: the image is still being read.
        """


class QuantisedWeights:
    """Weights that are quantised on their way into an image.

    Whatever writes whole images serves, on any number of ranks; the whole one that it writes stays with the publisher.

    Args:
        weights: that are published.
        how: they are quantised.
        directory: where the whole image lies; None chooses shared memory where there is room.
    """

    def __init__(self, weights: Snapshots, how: Quantisation, directory: Path | None = None) -> None:
        self._weights, self._how, self._directory = weights, how, directory
        self.layout = layout_of_quantised(weights.layout, how)
        self._whole: WeightImage | None = None

    @torch.no_grad()
    def snapshot_into(self, image: WeightImage) -> None:
        """Write header, numbers and scales; blocks.

        Raises:
            ValueError: the image does not have the layout's size.
            Conflict: the image is still being read.
            WeightTransferFailed: there is no room for the whole weights.
        """
        if image.image_bytes != self.layout.image_bytes:
            raise ValueError(f"the weights take {self.layout.image_bytes} bytes, the image has {image.image_bytes}")
        if self._whole is None:
            self._whole = WeightImage.create(self._weights.layout.image_bytes, directory=self._directory)
        self._weights.snapshot_into(self._whole)
        whole = {spec.name: view_of(self._whole.mapped, spec) for spec in self._weights.layout.tensors}
        with image.writing() as view:
            view[: len(self.layout.header)] = self.layout.header
            for spec, scales in quantised_specs(self.layout):
                weight, place = whole[spec.name], view_of(image.mapped, spec)
                if scales is None:
                    place.copy_(weight)
                    continue
                numbers, of_numbers = quantise(weight, self._how)
                place.copy_(numbers)
                view_of(image.mapped, scales).copy_(of_numbers)

    def close(self) -> None:
        """Remove the whole image."""
        if self._whole is not None:
            self._whole.close()
            self._whole = None


MAX_IMAGES = 4
PATIENCE_SECONDS = 1.0
"""Readers of an old image may take this long before it is withdrawn."""
PAUSE_SECONDS = 0.02


class ImagePool:
    """A few images of one layout, used in turn. An image that is still being read is not touched.

    Args:
        weights: what is copied.
        directory: where images lie; None chooses shared memory where there is room.
        slice_bytes: size of one broadcast.
        delta: whether and how patches are made; None makes none.
        served_as: the dtype that rollouts compute in, by which they prove what they serve; None: that of the weights.
        quantisation: of what is published; None: whole weights.
        base: that adapters are added to, where these are published alone; None: no digest is made of them.
    """

    def __init__(
        self,
        weights: Snapshots,
        *,
        directory: Path | None = None,
        slice_bytes: int = DEFAULT_SLICE_BYTES,
        delta: DeltaConfig | None = None,
        served_as: torch.dtype | None = None,
        quantisation: Quantisation | None = None,
        base: ModelConfig | None = None,
    ) -> None:
        self._quantised = None if quantisation is None else QuantisedWeights(weights, quantisation, directory)
        self._weights: Snapshots = self._quantised or weights
        self._quantisation = quantisation
        self._delta, self._served_as = delta, served_as
        self._adapted: AdaptedDigests | None = None
        if base is not None and BASE in weights.layout.metadata:
            self._adapted = AdaptedDigests(safetensors_files(model_directory(base)), served_as)
        self._base: tuple[WeightImage, str] | None = None
        self.patch: WeightImage | None = None
        """The patch that the newest manifest names."""
        self.is_broadcast = True
        """Whether there are members of broadcasts; only they can use a patch."""
        self._slice_bytes = slice_bytes
        self._directory = directory
        self._images: list[WeightImage] = []
        self._newest: WeightImage | None = None

    def snapshot(self) -> Path:
        """Copy the present weights into an unused image, never the newest one; blocks.

        Raises:
            WeightTransferFailed: there is no room for one.
        """
        end = time.monotonic() + PATIENCE_SECONDS
        for image in [each for each in self._images if each.is_withdrawn]:
            # Its file was deleted: present readers keep it, and no other could open it.
            log.warning("the file of an image is lost", extra={"image": image.path.name})
            self._drop(image)
        while True:
            for image in self._images:
                if not self._is_kept(image) and self._write(image):
                    return image.path
            if len(self._images) < MAX_IMAGES:
                self._images.append(WeightImage.create(self._weights.layout.image_bytes, directory=self._directory))
                continue
            if time.monotonic() > end:
                self._withdraw_oldest()
            else:
                time.sleep(PAUSE_SECONDS)

    def manifest(self, path: Path, version: int) -> Manifest:
        """Describe an image, and make the patch that leads to it where that pays; reads all of it twice."""
        image = next(image for image in self._images if image.path == path)
        manifest = image.manifest(version, self._slice_bytes)
        # By its own mapping: its file may be gone.
        tensors = {spec.name: view_of(image.mapped, spec) for spec in manifest.tensors}
        if manifest.base is None:
            digest: str | None = of_image(Dequantised(tensors, self._quantisation), self._served_as)
        else:
            digest = self._digest_of_sums(tensors)
        return manifest.model_copy(update={"image_path": str(path), "digest": digest, "delta": self._make_patch(image)})

    def _digest_of_sums(self, adapters: Mapping[str, Tensor]) -> str | None:
        """Digest base and adapters as engines add them; None, and a word in the log, where the base is not there."""
        header = AdaptersHeader.read(self._weights.layout.metadata)
        if self._adapted is None or header is None:
            return None
        try:
            return self._adapted.of(adapters, header)
        except WeightTransferFailed as error:
            log.warning("what engines make of adapters is not proved", extra={"cause": error.detail})
            return None

    def renew(self, path: Path) -> Path:
        """Replace the deleted file of an image; blocks. An existing one stays as it is.

        Raises:
            WeightTransferFailed: there is no room for it.
        """
        image = next(image for image in self._images if image.path == path)
        if not image.is_withdrawn:
            return path
        log.warning("the file of an image is lost, it is written again", extra={"image": path.name})
        renewed = WeightImage.create(image.image_bytes, directory=self._directory)
        with renewed.writing() as view:
            view[:] = image.view
        self._images.append(renewed)
        if self._newest is image:
            self._newest = renewed
        self._drop(image)
        return renewed.path

    def _drop(self, image: WeightImage) -> None:
        self._images.remove(image)
        if self._newest is image:
            self._newest = None
        if self._base is not None and self._base[0] is image:
            self._base = None
        image.close()

    def acknowledge(self, path: Path, manifest: Manifest) -> None:
        """Note that a version is committed: the next patch is made against its image, which is kept for that."""
        if self._delta is not None:
            self._base = next(image for image in self._images if image.path == path), manifest.checksum

    def close(self) -> None:
        """Remove all images; present readers keep theirs."""
        for image in self._images:
            image.close()
        self._images.clear()
        self._newest = self._base = None
        self._drop_patch()
        if self._quantised is not None:
            self._quantised.close()

    def _is_kept(self, image: WeightImage) -> bool:
        return image is self._newest or (self._base is not None and image is self._base[0])

    def _make_patch(self, image: WeightImage) -> DeltaManifest | None:
        self._drop_patch()
        if self._delta is None or self._base is None or not self.is_broadcast:
            return None
        (base, base_checksum), block_bytes = self._base, self._delta.block_kilobytes << 10
        changed = changed_blocks(base.view, image.view, block_bytes)
        num_bytes = patch_bytes(changed, image.image_bytes, block_bytes)
        if num_bytes > self._delta.max_share * image.image_bytes:
            return None
        self.patch = WeightImage.create(num_bytes, directory=self._directory)
        write_patch(self.patch.view, image.view, changed, block_bytes)
        return DeltaManifest(
            base_checksum=base_checksum,
            block_bytes=block_bytes,
            patch_bytes=num_bytes,
            checksum=self.patch.checksum(),
        )

    def _drop_patch(self) -> None:
        if self.patch is not None:
            self.patch.close()
            self.patch = None

    def _withdraw_oldest(self) -> None:
        oldest = next(image for image in self._images if not self._is_kept(image))
        log.warning("image is still being read, another takes its place", extra={"image": oldest.path.name})
        self._images.remove(oldest)
        oldest.close()

    def _write(self, image: WeightImage) -> bool:
        try:
            self._weights.snapshot_into(image)
        except Conflict:
            return False
        self._newest = image
        # Oldest first the next time.
        self._images.remove(image)
        self._images.append(image)
        return True
