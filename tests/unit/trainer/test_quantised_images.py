"""A version with 8 bits an element: its bytes, what an engine computes with it, and how that is proved."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from flotilla.services.rollout.engines.decoders.base import Decoder
from flotilla.services.rollout.engines.embedded.loading import load_decoder
from flotilla.services.rollout.engines.embedded.updates import prove
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.models.loading import LoadedModel
from flotilla.services.trainer.weights.flat_parameters import FlatParameters
from flotilla.services.trainer.worker.images import ImagePool
from flotilla.shared.errors import WeightsDiverged, WeightTransferFailed
from flotilla.shared.weights.image.quantised import SCALES, Dequantised, Quantisation, dequantise, quantise
from flotilla.shared.weights.image.tensors import open_image
from tests.integration.trainer.architectures import ARCHITECTURES
from tests.unit.trainer.builders import a_spec, uneven_groups

IDS = np.arange(12, dtype=np.int64)
HOWS: tuple[Quantisation, ...] = ("int8", "fp8")


def a_learner(directory: Path, name: str = "Qwen3", **sections: Any) -> Learner:
    model = ARCHITECTURES[name]()
    model.save_pretrained(directory)
    spec = a_spec(
        model={"path": str(directory)} | sections.pop("model", {}),
        optimisation={"steps": 4, "groups_per_mini_batch": 2, "learning_rate": 1e-2},
        **sections,
    )
    return Learner(spec, LoadedModel(model, directory))


def a_pool(learner: Learner, directory: Path, how: Quantisation) -> ImagePool:
    assert isinstance(learner.weights, FlatParameters)
    return ImagePool(learner.weights, directory=directory, served_as=torch.float32, quantisation=how)


def an_engine(directory: Path, **settings: Any) -> Decoder:
    return load_decoder(EngineSettings(str(directory), slots=2, context_tokens=64, **settings)).decoder


def log_probs(decoder: Decoder) -> torch.Tensor:
    return decoder.prefill([IDS], [[0]]).float().log_softmax(-1)


def rounded_log_probs(learner: Learner, how: Quantisation) -> torch.Tensor:
    """Compute with a copy of the model whose matrices are rounded as they are published."""
    model = copy.deepcopy(learner.loaded.model)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.copy_(dequantise(*quantise(weight, how)))
        logits: torch.Tensor = model(torch.from_numpy(IDS)[None]).logits[:, -1]
    return logits.float().log_softmax(-1)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", ["Qwen3", "Llama", "GPT-2"])
def test_an_engine_computes_with_the_rounded_weights(name: str, how: Quantisation, tmp_path: Path) -> None:
    learner = a_learner(tmp_path / "model", name)
    decoder, images = an_engine(tmp_path / "model"), a_pool(learner, tmp_path, how)
    learner.train(uneven_groups(2), 1)
    path = images.snapshot()
    manifest = images.manifest(path, 1)
    decoder.stage(path)
    decoder.switch()

    with torch.no_grad():
        exact = learner.loaded.model(torch.from_numpy(IDS)[None]).logits[:, -1].float().log_softmax(-1)
    found = log_probs(decoder)
    torch.testing.assert_close(found, rounded_log_probs(learner, how), atol=1e-4, rtol=0)
    assert (found - exact).abs().max() > 1e-4, "they are rounded"
    assert manifest.digest is not None
    prove(decoder, path, 1, manifest.digest)
    images.close()


@pytest.mark.parametrize("how", HOWS)
def test_an_image_has_about_half_the_bytes_of_bfloat16(how: Quantisation, tmp_path: Path) -> None:
    learner = a_learner(tmp_path / "model")
    images = a_pool(learner, tmp_path, how)
    path = images.snapshot()
    tensors = open_image(path)

    whole = sum(each.numel() for each in Dequantised(tensors, how).values()) * 2
    assert sum(each.numel() * each.element_size() for each in tensors.values()) <= 0.58 * whole, "of a tiny model"
    images.close()


def test_each_version_is_written_anew_and_the_newest_stays(tmp_path: Path) -> None:
    learner = a_learner(tmp_path / "model")
    images = a_pool(learner, tmp_path, "int8")
    first = images.snapshot()
    before = {name: each.clone() for name, each in Dequantised(open_image(first), "int8").items()}
    learner.train(uneven_groups(2), 1)
    second = images.snapshot()

    after = Dequantised(open_image(second), "int8")
    assert first != second
    assert any(not torch.equal(before[name], after[name]) for name in before)
    images.close()
    assert not list(tmp_path.glob("*.safetensors")) and not first.exists() and not second.exists()


def test_an_engine_that_holds_something_else_is_found(tmp_path: Path) -> None:
    learner = a_learner(tmp_path / "model")
    decoder, images = an_engine(tmp_path / "model"), a_pool(learner, tmp_path, "int8")
    learner.train(uneven_groups(2), 1)
    path = images.snapshot()
    digest = images.manifest(path, 1).digest
    assert digest is not None

    with pytest.raises(WeightsDiverged, match="is not what was published"):
        prove(decoder, path, 1, digest)
    images.close()


def test_adapters_are_added_before_weights_are_rounded(tmp_path: Path) -> None:
    learner = a_learner(tmp_path / "model", model={"lora": {"rank": 4}})
    decoder, images = an_engine(tmp_path / "model"), a_pool(learner, tmp_path, "int8")
    learner.train(uneven_groups(2), 1)
    assert learner.adapters is not None
    decoder.stage(images.snapshot())
    decoder.switch()
    learner.adapters.merge()

    torch.testing.assert_close(log_probs(decoder), rounded_log_probs(learner, "int8"), atol=1e-4, rtol=0)
    images.close()


@pytest.mark.parametrize("damage", ["shape", "dtype", "metadata"])
def test_scales_that_do_not_fit_are_refused(damage: str, tmp_path: Path) -> None:
    learner = a_learner(tmp_path / "model")
    decoder, images = an_engine(tmp_path / "model"), a_pool(learner, tmp_path, "int8")
    tensors = load_file(images.snapshot())
    name = next(each for each in tensors if each.endswith(SCALES))
    if damage == "shape":
        tensors[name] = tensors[name][:1].clone()
    elif damage == "dtype":
        tensors[name] = tensors[name].double()
    wrong = tmp_path / "wrong.safetensors"
    save_file(tensors, wrong, {"format": "pt", "quantisation": "int3" if damage == "metadata" else "int8"})

    with pytest.raises(WeightTransferFailed, match="int3" if damage == "metadata" else "do not fit"):
        decoder.stage(wrong)
    images.close()


def test_settings_of_an_engine_need_no_word_of_it(tmp_path: Path) -> None:
    learner = a_learner(tmp_path / "model")
    settings = EngineSettings(str(tmp_path / "model"), slots=2, context_tokens=64, dtype="bfloat16")
    decoder, images = load_decoder(replace(settings)).decoder, a_pool(learner, tmp_path, "fp8")
    decoder.stage(images.snapshot())
    decoder.switch()

    torch.testing.assert_close(log_probs(decoder), rounded_log_probs(learner, "fp8"), atol=0.1, rtol=0)
    images.close()
