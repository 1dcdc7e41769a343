"""What a rank reads by itself is what transformers loads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from flotilla.services.trainer.models.loading import LoadedModel, without_weights
from tests.integration.trainer.architectures import ARCHITECTURES

CPU = torch.device("cpu")


def made(directory: Path, name: str = "Qwen3", **arguments: Any) -> Path:
    ARCHITECTURES[name]().save_pretrained(directory, **arguments)  # type: ignore[operator]
    return directory


def in_parts(directory: Path, dtype: torch.dtype = torch.float32, **options: Any) -> LoadedModel | None:
    config = AutoConfig.from_pretrained(directory)
    if options.get("scores"):
        config.num_labels = 1
    return without_weights(directory, config, dtype, **options)


def filled(directory: Path, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    loaded = in_parts(directory, dtype, **options)
    assert loaded is not None
    assert loaded.stored is not None
    assert all(parameter.is_meta for parameter in loaded.model.parameters())
    loaded.stored.fill(loaded.model, CPU, CPU)
    return loaded.model


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    for mine, theirs in (
        (found.named_parameters(remove_duplicate=False), expected.named_parameters(remove_duplicate=False)),
        (found.named_buffers(), expected.named_buffers()),
    ):
        mine, theirs = dict(mine), dict(theirs)
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert mine[name].dtype == value.dtype, name
            assert torch.equal(mine[name], value), name


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_parameters_and_buffers_are_those_that_transformers_loads(tmp_path: Path, name: str) -> None:
    path = made(tmp_path, name)

    found = filled(path)

    assert_same(found, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))


def test_tied_weights_stay_one(tmp_path: Path) -> None:
    found: Any = filled(made(tmp_path))

    assert found.get_output_embeddings().weight is found.get_input_embeddings().weight


def test_weights_in_several_files_of_another_dtype_are_read(tmp_path: Path) -> None:
    path = made(tmp_path, "Qwen3-MoE", max_shard_size="20KB")
    assert len(list(path.glob("*.safetensors"))) > 1

    found = filled(path, torch.bfloat16)

    assert_same(found, AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16))


def test_a_checkpoint_of_the_body_alone_is_read(tmp_path: Path) -> None:
    path = made(tmp_path, "GPT-2")
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tensors = load_file(path / "model.safetensors")
    short = {name.removeprefix("transformer."): each for name, each in tensors.items()}
    save_file(short, path / "model.safetensors", metadata={"format": "pt"})

    found = filled(path)

    assert_same(found, whole)


def test_a_classifiers_new_head_is_made_and_an_old_one_is_read(tmp_path: Path) -> None:
    first: Any = filled(made(tmp_path), scores=True)
    again: Any = filled(tmp_path, scores=True)
    with torch.no_grad():
        first.score.weight.fill_(0.5)
    first.save_pretrained(tmp_path / "trained")

    trained: Any = filled(tmp_path / "trained", scores=True)

    assert 0 < again.score.weight.abs().max() < 1
    assert torch.equal(trained.score.weight, first.score.weight)
    assert_same(trained, AutoModelForSequenceClassification.from_pretrained(tmp_path / "trained", num_labels=1))


def test_what_was_saved_beside_the_weights_is_kept(tmp_path: Path) -> None:
    model: Any = ARCHITECTURES["Qwen3"]()
    model.generation_config.eos_token_id = 5
    model.save_pretrained(tmp_path)

    loaded = in_parts(tmp_path)

    assert loaded is not None
    assert loaded.model.generation_config.eos_token_id == 5  # type: ignore[union-attr]
    assert not loaded.model.training


@pytest.mark.parametrize("damage", ["renamed", "shape", "cut", "integers", "nothing"])
def test_what_is_not_known_by_name_and_shape_is_left_to_transformers(tmp_path: Path, damage: str) -> None:
    file = made(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    if damage == "renamed":
        tensors["model.layers.0.mlp.other.weight"] = tensors.pop(name)
    elif damage == "shape":
        tensors[name] = tensors[name][:1].clone()
    elif damage == "integers":
        tensors[name] = tensors[name].to(torch.int8)
    save_file(tensors, file, metadata={"format": "pt"})
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-8])
    if damage == "nothing":
        file.unlink()

    assert in_parts(tmp_path) is None
