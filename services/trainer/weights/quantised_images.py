"""Images of quantised weights: whole ones are written beside them, and quantised one matrix at a time."""

from pathlib import Path
from typing import Protocol

import torch

from flotilla.shared.weights.image.image import WeightImage
from flotilla.shared.weights.image.layout import ImageLayout
from flotilla.shared.weights.image.quantised import Quantisation, layout_of_quantised, quantise, quantised_specs
from flotilla.shared.weights.image.tensors import view_of


class WholeWeights(Protocol):
    """What writes whole weights into an image."""

    @property
    def layout(self) -> ImageLayout:
        """Of such an image."""

    def snapshot_into(self, image: WeightImage) -> None:
        """Write header and weights; blocks."""


class QuantisedWeights:
    """Weights that are quantised on their way into an image.

    Whatever writes whole images serves, on any number of ranks; the whole one that it writes stays with the publisher.

    Args:
        weights: that are published.
        how: they are quantised.
        directory: where the whole image lies; None chooses shared memory where there is room.
    """

    def __init__(self, weights: WholeWeights, how: Quantisation, directory: Path | None = None) -> None:
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
