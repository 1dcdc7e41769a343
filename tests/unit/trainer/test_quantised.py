"""Adapters beside weights in 4 bits: what is published is what the trainer computes with, and everything else is as it
was for whole weights.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from flotilla.services.trainer.checkpoint.export import merged
from flotilla.services.trainer.checkpoint.manager import beginning, fill_alone, restored_from
from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.models import quantised
from flotilla.services.trainer.models.loading import LoadedModel, load_model
from flotilla.services.trainer.models.quantised import QuantisedLinear, packed_layers, quantise
from flotilla.services.trainer.weights.flat_parameters import FlatParameters
from flotilla.services.trainer.weights.sharded_parameters import StreamedParameters
from flotilla.shared.checkpoints.folders import MODEL, OPTIMIZER, StoredCheckpoint
from flotilla.shared.checkpoints.lineage import Published
from flotilla.shared.config.sections.model import QuantisationConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import ModelError
from flotilla.shared.models.hub import ADAPTER
from flotilla.shared.weights.image.image import WeightImage
from tests.fleet import tiny_model
from tests.integration.trainer.architectures import ARCHITECTURES
from tests.unit.trainer.builders import a_spec, uneven_groups
from tests.unit.trainer.test_lora import a_state

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install '.[bitsandbytes]'")

CPU = torch.device("cpu")
NF4 = QuantisationConfig(dtype="nf4")
PACKINGS = [QuantisationConfig(dtype=dtype, double=double) for dtype in ("nf4", "fp4") for double in (False, True)]
VALUES = {
    "nf4": [-1, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0,
            0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1],
    "fp4": [sign * each for sign in (-1, 1) for each in (0.0, 0.0052, 0.1667, 0.25, 0.3333, 0.5, 0.6667, 1.0)],
}  # fmt: skip
"""QLoRA's appendix E, and bitsandbytes' floating-point numbers of 4 bits."""


def spec_of(lora: dict[str, Any] | None = None, **sections: Any) -> ExperimentSpec:
    optimisation = {"steps": 4, "groups_per_mini_batch": 2, "learning_rate": 1e-2}
    chosen = {"rank": 4, "quantisation": {"dtype": "nf4"}} | (lora or {})
    model = {"path": str(tiny_model()), "lora": chosen} | sections.pop("model", {})
    return a_spec(model=model, optimisation=optimisation, **sections)


def packed_model(model: nn.Module, config: QuantisationConfig = NF4) -> nn.Module:
    quantise(model, config)
    return model


def image_of(learner: Learner, directory: Path) -> dict[str, Tensor]:
    """Write an image and read it as the file that it is."""
    assert isinstance(learner.weights, StreamedParameters)
    with WeightImage.create(learner.weights.layout.image_bytes, directory=directory) as image:
        learner.weights.snapshot_into(image)
        return load_file(image.path)


def nearest(weight: Tensor, dtype: str) -> Tensor:
    """Write each element as the nearest of the 16 values times the largest of its 64; plainly."""
    flat, values = weight.reshape(-1), torch.tensor(VALUES[dtype])
    blocks = []
    for block in flat.split(64):
        scale = block.abs().max()
        chosen = (block[:, None] / scale - values).abs().argmin(1)
        blocks.append(values[chosen] * scale)
    return torch.cat(blocks).view(weight.shape)


@pytest.mark.parametrize("config", PACKINGS, ids=lambda config: f"{config.dtype}-{config.double}")
@pytest.mark.parametrize("shape", [(48, 32), (32, 96), (64, 128), (10, 6)], ids=str)
def test_a_weight_is_one_of_sixteen_values_times_the_scale_of_its_block(
    shape: tuple[int, int], config: QuantisationConfig
) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(shape[1], shape[0]))
    weight = model[0].weight.detach().clone()

    quantise(model, config)

    layer = model[0]
    assert isinstance(layer, QuantisedLinear)
    # Packed scales are off by up to a part of 2^7 of how much they differ.
    bound = (2e-4 if not config.double else 0.03) * float(weight.abs().max())
    off, least = ((each - weight).abs() for each in (layer.weight, nearest(weight, config.dtype)))
    assert (off - least).max() < bound
    taken = sum(each.nbytes for name, each in layer.named_buffers() if name != "scale_values")
    assert taken <= weight.numel() * (4.6 if not config.double else 4.3) / 8 + 16
    assert [name for name, _ in layer.named_parameters()] == ["bias"]


@pytest.mark.parametrize("name", ["linear", "conv1d"])
def test_a_layer_computes_with_the_weight_that_it_shows_and_keeps_none_for_the_backward_pass(name: str) -> None:
    make = ARCHITECTURES["Qwen3" if name == "linear" else "GPT-2"]
    layer = next(iter(packed_layers(packed_model(make())).values()))
    weight = layer.weight
    plain = weight if name == "linear" else weight.T
    inputs, same = (torch.randn(5, plain.shape[1], generator=torch.manual_seed(3)) for _ in range(2))
    kept: list[Tensor] = []

    with torch.autograd.graph.saved_tensors_hooks(lambda each: (kept.append(each), each)[1], lambda each: each):
        found = layer(inputs.requires_grad_())
    found.square().sum().backward()
    expected = nn.functional.linear(same.requires_grad_(), plain, getattr(layer, "bias", None))
    expected.square().sum().backward()

    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(inputs.grad, same.grad, atol=1e-5, rtol=1e-5)
    assert all(each.shape != weight.shape and each.shape != weight.T.shape for each in kept)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_is_published_computes_what_the_trainer_does(name: str, tmp_path: Path) -> None:
    make = ARCHITECTURES[name]
    learner = Learner(spec_of(), LoadedModel(packed_model(make()), Path()))
    adapters, model = learner.adapters, learner.loaded.model
    assert adapters is not None
    assert isinstance(learner.weights, StreamedParameters)
    ids, weights = torch.arange(12)[None], learner.weights
    before = image_of(learner, tmp_path)
    engine, whole = make(), make()
    loaded = FlatParameters(engine)
    assert weights.layout == loaded.layout

    def published_logits() -> Tensor:
        with WeightImage.create(loaded.layout.image_bytes, directory=tmp_path) as written:
            weights.snapshot_into(written)
            loaded.load_from(written)
        found: Tensor = engine(ids).logits
        return found

    with torch.no_grad():
        torch.testing.assert_close(published_logits(), model(ids).logits, atol=2e-5, rtol=1e-5)
        assert (whole(ids).logits - model(ids).logits).abs().max() > 1e-2
        reference = published_logits().clone()
    norm = learner.train(uneven_groups(2), 1).updates[-1].grad_norm
    with torch.no_grad():
        assert norm > 0
        torch.testing.assert_close(published_logits(), model(ids).logits, atol=2e-5, rtol=1e-5)
        assert (published_logits() - reference).abs().max() > 1e-3
        with adapters.disabled():
            torch.testing.assert_close(reference, model(ids).logits, atol=2e-5, rtol=1e-5)
    after = image_of(learner, tmp_path)
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed == {f"{key}.weight" for key in adapters.layers}


def test_a_directory_is_read_with_one_whole_weight_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pack, most = quantised._pack, 0
    model = beginning(spec_of(), CPU).learner.loaded.model
    whole = load_model(tiny_model(), dtype="float32", device=CPU).model
    sizes = {name: weight.numel() for name, weight in whole.named_parameters()}

    def packed(layer: nn.Module, config: QuantisationConfig) -> None:
        nonlocal most
        most = max(most, sum(each.numel() for each in read.parameters() if not each.is_meta))
        pack(layer, config)

    make = quantised.quantise

    def followed(found: nn.Module, *arguments: Any) -> None:
        nonlocal read
        read = found
        make(found, *arguments)

    read = model
    monkeypatch.setattr(quantised, "_pack", packed)
    monkeypatch.setattr("flotilla.services.trainer.models.loading.quantise", followed)
    again = load_model(tiny_model(), dtype="float32", device=CPU, quantisation=NF4).model

    assert most == max(sizes[f"{name}.weight"] for name in packed_layers(again))
    quantise(whole, NF4)
    for name, layer in packed_layers(again).items():
        assert torch.equal(layer.packed, packed_layers(whole)[name].packed), name
    plain = dict(whole.named_parameters())
    assert all(torch.equal(weight, plain[name]) for name, weight in again.named_parameters())


def test_linear_layers_take_a_seventh_of_their_memory_as_float32() -> None:
    model = beginning(spec_of(), CPU).learner.loaded.model

    layers = packed_layers(model).values()
    # One kilobyte per layer, of whatever size.
    taken = [each.nbytes for layer in layers for name, each in layer.named_buffers() if name != "scale_values"]

    assert sum(taken) < sum(4 * layer.packing.shape.numel() for layer in layers) / 7


@pytest.mark.parametrize("algorithm", [{}, {"old_log_probs": "recompute_at_version", "kl": {"placement": "loss"}}])
def test_a_restored_learner_goes_on_as_if_never_ended(algorithm: dict[str, Any], tmp_path: Path) -> None:
    spec = spec_of({"dropout": 0.3}, algorithm=algorithm)
    learner = beginning(spec, CPU).learner
    learner.train(at_version(1, seed=1), 1)
    learner.keep_version(2, 1)
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    fill_alone(learner, folder)
    expected = dict(learner.train(at_version(2, seed=2), 2).metrics)

    stored = StoredCheckpoint(1, folder, a_state(spec, learner.optimizer.updates - 1))
    restored = restored_from(spec, stored, CPU).learner
    found = dict(restored.train(at_version(2, seed=2), 2).metrics)

    assert found == expected
    whole = sum(path.stat().st_size for path in tiny_model().glob("*.safetensors"))
    assert (folder / MODEL / ADAPTER).stat().st_size < whole / 3
    assert (folder / OPTIMIZER).stat().st_size < whole


@pytest.mark.parametrize("config", PACKINGS, ids=lambda config: f"{config.dtype}-{config.double}")
def test_an_exported_checkpoint_is_what_was_published(config: QuantisationConfig, tmp_path: Path) -> None:
    learner = beginning(spec_of({"quantisation": config.model_dump()}), CPU).learner
    learner.train(uneven_groups(2), 1)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    fill_alone(learner, folder)
    expected = image_of(learner, tmp_path)

    model = merged(folder / MODEL).model

    found = dict(model.named_parameters())
    assert found.keys() >= expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key].data, tensor, atol=0, rtol=0, msg=key)
    model.save_pretrained(tmp_path / "whole")  # type: ignore[operator]
    assert "quantization_config" not in json.loads((tmp_path / "whole" / "config.json").read_text())


def test_a_checkpoint_says_how_its_base_is_packed_in_words_that_transformers_reads(tmp_path: Path) -> None:
    learner = beginning(spec_of(), CPU).learner
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    fill_alone(learner, folder)

    written = json.loads((folder / MODEL / "config.json").read_text())["quantization_config"]

    assert written["load_in_4bit"]
    assert (written["bnb_4bit_quant_type"], written["bnb_4bit_use_double_quant"]) == ("nf4", True)
    assert not hasattr(learner.loaded.model.config, "quantization_config")


def test_a_critic_is_whole_and_begins_with_the_weights_of_the_directory() -> None:
    learner = beginning(spec_of(algorithm={"advantage": {"kind": "gae"}}), CPU).learner
    assert learner.critic is not None
    whole = load_model(tiny_model(), dtype="float32", device=CPU).model.base_model
    assert isinstance(whole, nn.Module)

    own = dict(learner.critic.body.named_parameters())
    assert all(torch.equal(weight, own[name]) for name, weight in whole.named_parameters())
    # The first update moves its head alone, which begins at 0.
    for step in (1, 2):
        learner.train(uneven_groups(2, seed=step), step)
    assert any(not torch.equal(weight, own[name]) for name, weight in whole.named_parameters())
    assert packed_layers(learner.loaded.model)


def test_what_rollouts_get_first_is_what_the_trainer_computes_with() -> None:
    assert beginning(spec_of(), CPU).published == Published(1, 0)
    assert beginning(a_spec(model={"path": str(tiny_model())}), CPU).published == Published(0, 0)


def test_an_adapter_on_another_packing_is_refused(tmp_path: Path) -> None:
    learner = beginning(spec_of(), CPU).learner
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    fill_alone(learner, folder)
    path = folder / MODEL / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "gptq"}}))

    with pytest.raises(ModelError, match="not by bitsandbytes in 4 bits: merge it with peft"):
        merged(folder / MODEL)


def at_version(version: int, *, seed: int) -> list[Any]:
    """Make groups whose tokens one version sampled."""
    groups = uneven_groups(2, seed=seed)
    return [
        replace(group, trajectories=tuple(replace(each, versions=((0, version),)) for each in group.trajectories))
        for group in groups
    ]
