"""Adapters that come alone: samples in flight, engines that join, and images that never become whole."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from flotilla.services.rollout.engines.decoders.arrival import Arrival
from flotilla.services.rollout.engines.embedded.engine import TorchEngine
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.errors import Unavailable, WeightTransferFailed
from flotilla.shared.models.weight_files import checksum_of, safetensors_files
from flotilla.shared.weights.image.adapters import AdaptersHeader, names_of
from flotilla.shared.weights.image.image import WeightImage
from flotilla.shared.weights.image.layout import ImageLayout
from tests.contract.engine.models import make_model, scores
from tests.contract.engine.requests import a_request
from tests.integration.engine.conftest import SavedModel
from tests.integration.engine.running import answer, outcomes, steps, update_errors

Saved = Callable[[str], SavedModel]
PROMPT = tuple(range(10, 21))
RANK, SCALE = 2, 0.5


def adapted(family: str, path: Path, directory: Path, seed: int = 1, rank: int = RANK) -> tuple[nn.Module, Path]:
    """Make adapters of all linear layers of a family: the model merged with them, and their image."""
    model, generator = make_model(family), torch.Generator().manual_seed(seed)
    tensors, is_transposed = {}, False
    with torch.no_grad():
        for name, layer in model.named_modules():
            if not isinstance(layer, nn.Linear | Conv1D) or name == "lm_head":
                continue
            is_transposed = isinstance(layer, Conv1D)
            wide, out = layer.weight.shape if is_transposed else reversed(layer.weight.shape)
            low, high = (0.3 * torch.randn(shape, generator=generator) for shape in ((rank, wide), (out, rank)))
            added = SCALE * (high @ low)
            layer.weight += added.T if is_transposed else added
            tensors |= dict(zip(names_of(f"{name}.weight"), (low, high), strict=True))
    header = AdaptersHeader(checksum_of(safetensors_files(path)), SCALE, is_transposed)
    layout = ImageLayout.of({name: (each.shape, "F32") for name, each in tensors.items()}, header.metadata)
    image = WeightImage.create(layout.image_bytes, directory=directory)
    image.write_from(layout, [tensors[spec.name].numpy() for spec in layout.tensors])
    return model, image.hand_over()


def check(engine: TorchEngine, model: nn.Module, version: int) -> None:
    [completion] = answer(engine, a_request(PROMPT, max_new_tokens=12))
    assert completion.versions == ((0, version),)
    expected = scores(model, PROMPT, completion.token_ids)
    np.testing.assert_allclose(completion.log_probs, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["qwen3", "llama-gqa-tied", "gpt2", "mistral-window", "mamba"])
def test_an_engine_that_joins_gets_its_base_and_the_newest_adapters(saved: Saved, tmp_path: Path, family: str) -> None:
    new, image = adapted(family, saved(family).path, tmp_path)
    engine = saved(family).engine()
    engine.discard_weights()

    engine.request_update(1, image, 7, OnWeightUpdate.INTERRUPT)
    steps(engine)

    check(engine, new, 7)


def test_adapters_of_a_later_version_replace_those_of_an_earlier_one(saved: Saved, tmp_path: Path) -> None:
    path = saved("qwen3").path
    engine = saved("qwen3").engine()
    for version in (4, 5, 6):
        new, image = adapted("qwen3", path, tmp_path, seed=version)

        engine.request_update(1, image, version, OnWeightUpdate.DRAIN)
        steps(engine)

        check(engine, new, version)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_sample_in_flight_goes_on_under_new_adapters_and_says_which_sampled_each_token(
    saved: Saved, tmp_path: Path, *, overlap: bool
) -> None:
    new, image = adapted("qwen3", saved("qwen3").path, tmp_path)
    engine = saved("qwen3").engine(overlap_load=overlap)
    in_flight = a_request(PROMPT, seeds=(1, 2), max_new_tokens=60)
    engine.submit(in_flight)
    answers = steps(engine, 9)

    engine.request_update(1, image, 5, OnWeightUpdate.INTERRUPT)
    while not engine.is_idle:
        answers |= steps(engine, 1)
        time.sleep(0.02)  # a model of another size takes so long: what is read beside it arrives before its last step

    for completion in answers[in_flight.request_id]:
        [(_, before), (start, after)] = completion.versions
        assert (before, after) == (0, 5)
        old, now = (scores(each, PROMPT, completion.token_ids) for each in (saved("qwen3").model, new))
        np.testing.assert_allclose(completion.log_probs[:start], old[:start], atol=1e-4, rtol=0)
        np.testing.assert_allclose(completion.log_probs[start:], now[start:], atol=1e-4, rtol=0)


def test_adapters_are_read_as_they_arrive_and_serve_nothing_when_the_rest_never_comes(
    saved: Saved, tmp_path: Path
) -> None:
    new, image = adapted("qwen3", saved("qwen3").path, tmp_path)
    engine = saved("qwen3").engine(overlap_load=True)
    arriving, content = tmp_path / "arriving.safetensors", image.read_bytes()
    arriving.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))
    lost = Arrival(arriving, 5)
    engine.begin_transfer(lost)
    lost.advance(len(content) // 2)

    lost.abort("the trainer died")

    check(engine, saved("qwen3").model, 0)
    engine.request_update(1, arriving, 5, OnWeightUpdate.DRAIN)
    arriving.write_bytes(content)
    outcomes(engine)
    check(engine, new, 5)


def test_adapters_of_layers_or_shapes_that_the_base_has_not_leave_the_version(saved: Saved, tmp_path: Path) -> None:
    _, image = adapted("qwen3", saved("qwen3").path, tmp_path)
    engine = saved("qwen2").engine()

    engine.request_update(1, image, 5, OnWeightUpdate.DRAIN)
    [error] = update_errors(outcomes(engine))

    assert isinstance(error, WeightTransferFailed)
    assert "the adapters are for a base" in error.detail
    check(engine, saved("qwen2").model, 0)


def test_an_engine_that_slept_serves_adapters_on_the_weights_of_its_files(saved: Saved, tmp_path: Path) -> None:
    new, image = adapted("qwen3", saved("qwen3").path, tmp_path)
    engine = saved("qwen3").engine()
    engine.sleep()
    with pytest.raises(Unavailable):
        engine.submit(a_request(PROMPT))

    engine.request_update(1, image, 5, OnWeightUpdate.DRAIN)
    steps(engine)

    check(engine, new, 5)
