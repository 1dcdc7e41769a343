"""Bounds on the tiles of an image, and what is not taken."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flotilla.shared.errors import ModelError
from flotilla.shared.vision.layouts import TileLayout, layout_of
from flotilla.shared.vision.processor import ImageProcessor

TILE = 448 * 448


def a_processor(least: int = 1, most: int = 12) -> Any:
    return SimpleNamespace(size=SimpleNamespace(height=448, width=448), min_patches=least, max_patches=most)


@pytest.mark.parametrize(
    ("pixels", "tiles"),
    [
        ((None, None), (1, 12)),
        ((3136, 1_048_576), (1, 5)),
        ((3 * TILE, None), (3, 12)),
        ((2 * TILE + 1, 4 * TILE), (3, 4)),
        ((None, 100 * TILE), (1, 12)),
    ],
)
def test_bounds_on_pixels_bound_the_tiles(pixels: tuple[int | None, int | None], tiles: tuple[int, int]) -> None:
    processor = a_processor()

    TileLayout(processor, 256, "<img>", "</img>").bound(*pixels)

    assert (processor.min_patches, processor.max_patches) == tiles


@pytest.mark.parametrize(
    ("pixels", "why"),
    [
        ((None, TILE - 1), "pixels of a tile"),
        ((13 * TILE, None), "13 tiles"),
        ((2 * TILE + 1, 2 * TILE + 2), "3 tiles"),
    ],
)
def test_bounds_that_no_tiles_have_are_refused(pixels: tuple[int | None, int | None], why: str) -> None:
    with pytest.raises(ModelError, match=why):
        TileLayout(a_processor(), 256, "<img>", "</img>").bound(*pixels)


def test_tokens_around_images_must_be_known_and_a_tiles_must_be_those_of_its_pixels(tmp_path: Path) -> None:
    config = {"image_seq_length": 256, "downsample_ratio": 0.5, "vision_config": {"patch_size": [14, 14]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = SimpleNamespace(start_image_token="<img>", end_image_token="</img>")

    assert layout_of("internvl", tmp_path, a_processor(), tokenizer).opening == "<img>"
    with pytest.raises(ModelError, match="start_image_token"):
        layout_of("internvl", tmp_path, a_processor(), SimpleNamespace())
    (tmp_path / "config.json").write_text(json.dumps(config | {"image_seq_length": 64}))
    with pytest.raises(ModelError, match="64 tokens"):
        layout_of("internvl", tmp_path, a_processor(), tokenizer)


def test_a_kind_whose_images_are_not_computed_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "image_token_id": 5}))

    with pytest.raises(ModelError, match="both directions"):
        ImageProcessor.from_directory(tmp_path)
