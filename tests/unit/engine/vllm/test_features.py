"""Images as a vLLM server is sent them."""

import base64
import json
from typing import Any

import msgpack
import numpy as np

from flotilla.services.rollout.engines.base import PromptImage
from flotilla.services.rollout.engines.servers.dialect import ShownImages
from flotilla.services.rollout.engines.vllm.features import RAW, features_of, limits_of
from flotilla.shared.config.sections.images import ImagesConfig
from flotilla.shared.vision.files import digest_of
from flotilla.shared.vision.layouts import ProcessedImage

PIXELS = np.arange(48, dtype=np.float32).reshape(8, 6)


class Processor:
    token_id = 5

    def process(self, data: bytes) -> ProcessedImage:
        return ProcessedImage(PIXELS, (1, 2, 4), 1, 2)


def shown(serving: int = 3) -> ShownImages:
    images = [PromptImage(4, 2, b"first"), PromptImage(9, 2, b"other")]
    return ShownImages(images, Processor(), serving)  # type: ignore[arg-type]


def read(item: str) -> dict[str, Any]:
    found: dict[str, Any] = msgpack.unpackb(base64.b64decode(item))
    return found


def array_of(field: dict[str, Any]) -> np.ndarray[Any, Any]:
    kind, shape, raw = field["data"]
    assert raw.code == RAW
    return np.frombuffer(raw.data, kind).reshape(shape)


def test_a_server_is_sent_pixels_grids_and_places() -> None:
    found = features_of(shown())

    assert found["mm_placeholders"] == {"image": [{"offset": 4, "length": 2}, {"offset": 9, "length": 2}]}
    [item, _] = found["kwargs_data"]["image"]
    fields = read(item)
    np.testing.assert_array_equal(array_of(fields["pixel_values"]), PIXELS)
    assert array_of(fields["image_grid_thw"]).tolist() == [1, 2, 4]
    assert fields["pixel_values"]["field"][1]["slices"] == [[0, 8, None]]


def test_what_is_kept_of_an_image_goes_by_its_content_and_the_version() -> None:
    names, later = (features_of(shown(version))["mm_hashes"]["image"] for version in (3, 4))

    assert names == [f"{digest_of(each)}-3" for each in (b"first", b"other")]
    assert not set(names) & set(later)


def test_limits_are_those_of_the_spec() -> None:
    given = limits_of(ImagesConfig(min_pixels=10, max_per_prompt=2))

    assert json.loads(given["limit_mm_per_prompt"]) == {"image": 2, "video": 0}
    assert json.loads(given["mm_processor_kwargs"]) == {"min_pixels": 10}
    assert "mm_processor_kwargs" not in limits_of(ImagesConfig())
