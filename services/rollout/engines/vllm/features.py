"""Images of a prompt as vLLM's ``/inference/v1/generate`` takes them: pixels, grids and places, in its own msgpack.

The server is given what a processor of its own would have made. So it sees what the trainer sees to the last bit,
whatever it would decode and resize images with, and gets the positions of images' tokens: one that the policy
sampled is a token like any other.
"""

import base64
import json
from typing import Any, Final

import msgpack
import numpy as np
import numpy.typing as npt

from flotilla.services.rollout.engines.servers.dialect import ShownImages
from flotilla.shared.config.sections.images import ImagesConfig
from flotilla.shared.vision.files import digest_of
from flotilla.shared.vision.layouts import ProcessedImage

IMAGE: Final = "image"
RAW: Final = 3
"""The extension of msgpack that its tensors' bytes have."""


def features_of(shown: ShownImages) -> dict[str, Any]:
    """Make ``features`` of a request; what the tower made of an image is kept under a name that has the version."""
    images = shown.images
    return {
        "mm_hashes": {IMAGE: [f"{digest_of(image.data)}-{shown.serving}" for image in images]},
        "mm_placeholders": {IMAGE: [{"offset": image.start, "length": image.num_tokens} for image in images]},
        "kwargs_data": {IMAGE: [_item(shown.processor.process(image.data)) for image in images]},
    }


def limits_of(images: ImagesConfig) -> dict[str, str]:
    """Make the arguments for the number of images of a prompt and, if the spec sets it, their size.

    The server makes room for the largest.
    """
    limits = {"limit_mm_per_prompt": json.dumps({IMAGE: images.max_per_prompt, "video": 0})}
    bounds = {"min_pixels": images.min_pixels, "max_pixels": images.max_pixels}
    given = {name: bound for name, bound in bounds.items() if bound is not None}
    if given:
        limits["mm_processor_kwargs"] = json.dumps(given)
    return limits


def _item(image: ProcessedImage) -> str:
    num_patches = len(image.pixel_values)
    fields = {
        "pixel_values": {
            "data": _tensor(image.pixel_values),
            "field": ["flat", {"keep_on_cpu": False, "slices": [[0, num_patches, None]], "dim": 0}],
        },
        "image_grid_thw": {
            "data": _tensor(np.array(image.grid, np.int64)),
            "field": ["batched", {"keep_on_cpu": True}],
        },
    }
    return base64.b64encode(msgpack.packb(fields)).decode("ascii")


def _tensor(array: npt.NDArray[Any]) -> list[Any]:
    return [array.dtype.name, list(array.shape), msgpack.ExtType(RAW, array.tobytes())]
