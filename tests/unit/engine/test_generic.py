"""Which decoder serves a model that only transformers computes: found out by trying, with what a device is promised."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from flotilla.services.rollout.engines.base import PromptImage
from flotilla.services.rollout.engines.decoders import generic
from flotilla.services.rollout.engines.decoders.base import Tokens
from flotilla.services.rollout.engines.decoders.illustrated import VisionDecoder
from flotilla.services.rollout.engines.embedded.loading import load_decoder
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.shared.vision.processor import ImageProcessor
from tests.vision_models import KINDS, a_picture, save_vision_model


class OnAnotherDevice:
    """Takes token ids on its device alone, as the cached forward on a GPU does."""

    vocab_size = 7
    device = torch.device("meta")

    def __init__(self) -> None:
        self.devices: list[torch.device] = []

    def prefill(self, sequences: Sequence[Tokens], rows: Sequence[Sequence[int]]) -> Tensor:
        return torch.zeros(len(sequences), self.vocab_size)

    def decode(self, token_ids: Tensor, lengths: Tensor, longest: int) -> Tensor:
        self.devices.append(token_ids.device)
        return torch.zeros(len(lengths), self.vocab_size)


def test_the_trial_hands_token_ids_over_on_the_device() -> None:
    decoder = OnAnotherDevice()

    assert generic._largest_difference(decoder, decoder) == 0  # type: ignore[arg-type]
    assert decoder.devices == [decoder.device] * (2 * generic.PROBE_STEPS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_sees_keeps_its_cache(tmp_path: Path, kind: str, dtype: str) -> None:
    save_vision_model(tmp_path, kind, hidden=64)
    settings = EngineSettings(
        model_path=str(tmp_path), device="cpu", dtype=dtype, slots=2, context_tokens=128, image_pixels=(64, 1024)
    )

    decoder = load_decoder(settings).decoder

    assert isinstance(decoder, VisionDecoder), decoder.description


@pytest.mark.parametrize("kind", KINDS)
def test_in_bfloat16_pictures_are_computed_and_go_on_in_the_cache(tmp_path: Path, kind: str) -> None:
    save_vision_model(tmp_path, kind, hidden=64)
    pixels = (64, 1024)
    picture = a_picture("red", (16, 16))
    rows, columns = ImageProcessor.from_directory(tmp_path, min_pixels=64, max_pixels=1024).grid_of(picture)
    prompt = np.array([1, 3, *[5] * (rows * columns), 4, 9, 2], dtype=np.int64)
    shown = [[PromptImage(2, rows * columns, picture)]]
    found = []
    for dtype in ("float32", "bfloat16"):
        settings = EngineSettings(
            model_path=str(tmp_path), dtype=dtype, slots=2, context_tokens=128, image_pixels=pixels
        )
        decoder = load_decoder(settings).decoder
        assert isinstance(decoder, VisionDecoder)
        logits = [decoder.prefill_illustrated([prompt], [[0, 1]], shown)]
        for step in range(2):
            lengths = torch.tensor([len(prompt) + step] * 2)
            logits.append(decoder.decode(torch.tensor([8, 10]), lengths, len(prompt) + step))
        found.append(torch.cat(logits).float().log_softmax(-1))

    assert (found[0] - found[1]).abs().max() < 0.05
