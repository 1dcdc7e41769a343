"""How often a frozen tower computes, where several divide its weights."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from flotilla.shared.vision.layouts import GridLayout, ProcessedImage
from flotilla.shared.vision.processor import ImageProcessor
from flotilla.shared.vision.tower import PlacedImages, Tower
from tests.vision_models import a_picture

NOWHERE = torch.zeros(0, dtype=torch.int64)
RED, BLUE = a_picture("red"), a_picture("blue")


class Counting:
    """Stands for a model with a tower: counts what it is asked for."""

    def __init__(self) -> None:
        self.count = 0
        self.embedding = torch.nn.Embedding(3, 4)

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.embedding

    def get_image_features(self, pixels: torch.Tensor, _: torch.Tensor, **__: Any) -> Any:
        self.count += 1
        return SimpleNamespace(pooler_output=torch.zeros(len(pixels), 4))


class Pixels(ImageProcessor):
    """Gives each image one token."""

    def __init__(self) -> None:
        super().__init__(GridLayout(None, 2), "<|image_pad|>", 2)

    def process(self, data: bytes) -> ProcessedImage:
        return ProcessedImage(np.zeros((1, 4), np.float32), (1, 1, 1), 1, 1)


def shown(tower: Tower, *images: bytes) -> None:
    tower.arguments(torch.zeros(1, 3, dtype=torch.int64), PlacedImages(images, NOWHERE, NOWHERE))


def test_an_image_is_computed_once_by_one_that_has_all_weights() -> None:
    body = Counting()
    tower = Tower(body, Pixels(), is_frozen=True)

    for images in ((RED,), (RED, BLUE), (BLUE,)):
        shown(tower, *images)

    assert body.count == 2


def test_all_that_divide_a_tower_compute_as_often_as_the_one_with_most_to_do() -> None:
    body, asked = Counting(), []

    def most(count: int) -> int:
        asked.append(count)
        return max(count, 2) if len(asked) < 3 else count

    tower = Tower(body, Pixels(), is_frozen=True, most=most)

    for images in ((RED,), (RED,), (RED, BLUE), (RED, BLUE)):
        shown(tower, *images)

    assert asked == [1, 0, 1, 0]
    assert body.count == 5
