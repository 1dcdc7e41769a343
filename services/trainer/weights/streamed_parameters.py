"""A module's weights, some of them packed, written into images one by one.

Where all of them are parameters, ``FlatParameters`` copies them in one go; but weights that are packed cannot lie in
flat buffers as they are published, and all of them unpacked would be what packing saves.
"""

import torch

from flotilla.services.trainer.weights.parts import write_parts
from flotilla.services.trainer.weights.sharded_parameters import ShardedParameters
from flotilla.shared.weights.image.image import WeightImage


class StreamedParameters(ShardedParameters):
    """Those of one process. Arguments as of ``ShardedParameters``; one weight at a time is whole beside the model."""

    @torch.no_grad()
    def snapshot_into(self, image: WeightImage) -> None:
        """Write header and weights into the image.

        Raises:
            ValueError: the image does not have the layout's size.
            Conflict: the image is still being read.
        """
        layout = self.layout
        if image.image_bytes != layout.image_bytes:
            raise ValueError(f"the weights take {layout.image_bytes} bytes, the image has {image.image_bytes}")
        with image.writing() as view:
            view[: len(layout.header)] = layout.header
            write_parts(image.mapped, layout, self.image_parts())
