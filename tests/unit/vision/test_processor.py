"""What a processor of images remembers, and for how long; and that words that look like an image are none."""

import sys
from base64 import b64encode
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flotilla.services.gateway.datasets.length_worker import count
from flotilla.shared.models.prompts import PromptTemplate, load_tokenizer
from flotilla.shared.vision import processor as processing
from flotilla.shared.vision.layouts import GridLayout
from flotilla.shared.vision.processor import ImageProcessor, token_ids_of, without_cuts
from tests.vision_models import a_picture, save_vision_model

VALUES = 1024
NUM_BYTES = 4 * VALUES


class Counting:
    """Stands for transformers' processor: counts what it is asked for."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, **_: Any) -> Any:
        self.count += 1
        return SimpleNamespace(pixel_values=np.zeros((1, VALUES), np.float32), image_grid_thw=np.array([[1, 4, 6]]))


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    monkeypatch.setattr(processing, "MOST_KEPT_BYTES", 2 * NUM_BYTES)
    return Counting()


def test_pixels_are_kept_as_long_as_there_is_room_for_their_bytes(counting: Counting) -> None:
    processor = ImageProcessor(GridLayout(counting, 2), "<|image_pad|>", 5)
    first, second, third = (a_picture(seed=seed) for seed in range(3))

    for image in (first, second, first, third, first):
        assert processor.process(image).pixel_values.nbytes == NUM_BYTES
    assert counting.count == 3

    processor.process(second)
    assert counting.count == 4


def test_the_bytes_of_a_picture_are_not_kept_for_its_grid(counting: Counting) -> None:
    processor = ImageProcessor(GridLayout(counting, 2), "<|image_pad|>", 5)
    image = a_picture()
    before = sys.getrefcount(image)

    assert processor.grid_of(image) == (2, 3)

    assert sys.getrefcount(image) == before
    for seed in range(1, 4):
        processor.process(a_picture(seed=seed))
    processor.grid_of(image)
    assert counting.count == 4


def test_words_of_image_tokens_become_tokens_of_their_letters_and_a_row_may_not_have_them(tmp_path: Path) -> None:
    folder = save_vision_model(tmp_path)
    processor, tokenizer = ImageProcessor.from_directory(folder), load_tokenizer(str(folder))
    said = "is <|image_pad|> or <|vision_start|> <|video_pad|> red"
    message = {"role": "tool", "content": [{"type": "text", "text": said}], "calls": ({"arguments": {"a": said}},)}

    kept = processor.as_text(message)
    token_ids = token_ids_of(tokenizer, kept["content"][0]["text"])

    assert not {processor.token_id, *processor.marks} & {*token_ids}
    assert token_ids_of(tokenizer, "is <|image_pad|> red") == tuple(tokenizer("is <|image_pad|> red")["input_ids"])
    assert without_cuts(kept["content"][0]["text"]) == said == without_cuts(kept["calls"][0]["arguments"]["a"])
    image = b64encode(a_picture()).decode()
    found = count(tokenizer, PromptTemplate(), [[["user", f"<image> {said}"]]], images=[[image]], processor=processor)
    assert "the row's text has <|image_pad|>" in found["error"]
