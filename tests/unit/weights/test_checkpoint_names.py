"""Images have the names, shapes and values of the checkpoint, whatever transformers keeps fused in memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from flotilla.services.rollout.engines.decoders.generic import ModelWeights
from flotilla.services.trainer.weights.flat_parameters import FlatParameters
from flotilla.shared.errors import WeightTransferFailed
from flotilla.shared.weights.image.checkpoint_names import pieces_of
from flotilla.shared.weights.image.image import WeightImage

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "qwen2": SIZES,
    "qwen3": SIZES | {"tie_word_embeddings": True},
    "mistral": SIZES,
    "gemma3_text": SIZES | {"query_pre_attn_scalar": 8, "sliding_window": 16},
    "phi3": SIZES | {"rope_scaling": None},
    "gpt2": {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "qwen3_moe": SIZES | EXPERTS | {"num_experts": 4, "moe_intermediate_size": 8, "decoder_sparse_step": 2},
    "mixtral": SIZES | EXPERTS | {"num_local_experts": 4},
}


def make(kind: str, directory: Path, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **ARCHITECTURES[kind]))
    model.save_pretrained(directory)
    loaded: nn.Module = AutoModelForCausalLM.from_pretrained(directory)
    return loaded


def image_of(model: nn.Module, directory: Path) -> WeightImage:
    flat = FlatParameters(model)
    image = WeightImage.create(flat.layout.image_bytes, directory=directory)
    flat.snapshot_into(image)
    return image


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_an_image_holds_what_the_checkpoint_holds(kind: str, tmp_path: Path) -> None:
    image = image_of(make(kind, tmp_path / kind), tmp_path)

    expected, found = load_file(tmp_path / kind / "model.safetensors"), load_file(image.path)

    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    image.close()


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "qwen3", "gpt2"])
def test_an_engine_takes_over_an_image(kind: str, tmp_path: Path) -> None:
    trained, served = make(kind, tmp_path / "a", 1).eval(), make(kind, tmp_path / "b", 2).eval()
    token_ids = torch.arange(3, 12).unsqueeze(0)
    image = image_of(trained, tmp_path)

    weights = ModelWeights(served)
    weights.stage(image.path)
    weights.switch()

    assert torch.equal(served(token_ids).logits, trained(token_ids).logits)
    image.close()


def test_an_engine_refuses_an_image_without_one_expert(tmp_path: Path) -> None:
    model = make("mixtral", tmp_path / "a")
    smaller = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("mixtral", **ARCHITECTURES["mixtral"] | {"num_local_experts": 3})
    )
    image = image_of(smaller, tmp_path)

    with pytest.raises(WeightTransferFailed):
        ModelWeights(model).stage(image.path)
    image.close()


def test_a_module_that_transformers_did_not_make_keeps_its_names() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}

    assert [(piece.name, piece.shape) for piece in pieces_of(module, shapes)] == list(shapes.items())
