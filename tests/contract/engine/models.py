"""Tiny random models on disk, and what transformers says about their tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.utils import logging

from flotilla.shared.models.weight_files import checksum_of, safetensors_files, shapes_in
from flotilla.shared.weights.image.adapters import AdaptersHeader, names_of, weight_of

VOCAB = 96
EOS = 1

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "eos_token_id": EOS,
}
_EXPERTS = {"num_hidden_layers": 3, "num_key_value_heads": 2, "num_experts_per_tok": 2}
_ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

FAMILIES: dict[str, tuple[type[PretrainedConfig], dict[str, Any], str]] = {
    "llama": (LlamaConfig, {**_SIZES, "num_key_value_heads": 4}, "fused"),
    "llama-gqa-tied": (
        LlamaConfig,
        {
            **_SIZES,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        },
        "fused",
    ),
    "mistral": (MistralConfig, {**_SIZES, "num_key_value_heads": 2, "sliding_window": None}, "fused"),
    "qwen2": (Qwen2Config, {**_SIZES, "num_key_value_heads": 2}, "fused"),
    "qwen3": (Qwen3Config, {**_SIZES, "num_key_value_heads": 2, "head_dim": 16}, "fused"),
    # The narrowest heads that vLLM's kernels for CPUs have.
    "qwen3-32": (Qwen3Config, {**_SIZES, "num_key_value_heads": 2, "head_dim": 32}, "fused"),
    "qwen3-tied": (
        Qwen3Config,
        {**_SIZES, "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": True},
        "fused",
    ),
    "llama-scaled-rope": (
        LlamaConfig,
        {**_SIZES, "num_key_value_heads": 2, "rope_parameters": {**_ROPE, "original_max_position_embeddings": 32}},
        "cached",
    ),
    "mistral-window": (MistralConfig, {**_SIZES, "num_key_value_heads": 2, "sliding_window": 6}, "cached"),
    "gemma2": (Gemma2Config, {**_SIZES, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6}, "cached"),
    "gpt2": (
        GPT2Config,
        {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "vocab_size": VOCAB,
            "n_positions": 128,
            "initializer_range": 0.2,
            "bos_token_id": 0,
            "eos_token_id": EOS,
        },
        "cached",
    ),
    "opt": (
        OPTConfig,
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 64,
            "vocab_size": VOCAB,
            "max_position_embeddings": 128,
            "word_embed_proj_dim": 32,
            "init_std": 0.2,
        },
        "cached",
    ),
    "gpt-neox": (GPTNeoXConfig, _SIZES, "cached"),
    "bloom": (
        BloomConfig,
        {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, "initializer_range": 0.2},
        "cached",
    ),
    "qwen3-moe": (
        Qwen3MoeConfig,
        {
            **_SIZES,
            **_EXPERTS,
            "head_dim": 32,
            "num_experts": 8,
            "moe_intermediate_size": 32,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
        },
        "cached",
    ),
    "mixtral": (MixtralConfig, {**_SIZES, **_EXPERTS, "num_local_experts": 8, "sliding_window": None}, "cached"),
    "mamba": (
        MambaConfig,
        {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCAB, "state_size": 8},
        "recomputed",
    ),
}


def make_model(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Make a random model; vectors such as norms and biases are random too, so that none can be forgotten."""
    kind, sizes, _ = FAMILIES[family]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(kind(**sizes)).to(dtype).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def save_model(family: str, directory: Path, *, seed: int = 0) -> nn.Module:
    """Make a random model and save it."""
    logging.disable_progress_bar()
    model = make_model(family, seed=seed)
    model.save_pretrained(directory)
    return model


def save_long_model(directory: Path, positions: int = 4096) -> Path:
    """Save the model that engines and servers are tested with, whose context has room for long samples."""
    save_model("qwen3-32", directory)
    config = directory / "config.json"
    config.write_text(
        config.read_text().replace('"max_position_embeddings": 128', f'"max_position_embeddings": {positions}')
    )
    return directory


def save_image(model: nn.Module, path: Path, **changes: torch.Tensor) -> Path:
    """Save a weight image of a model, without the head when it is tied."""
    tensors = {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_file({**tensors, **changes}, path)
    return path


def save_adapters(directory: Path, path: Path, *, seed: int, rank: int = 4, scale: float = 2.0) -> Path:
    """Save an image of adapters alone for the attention and the MLP of a model: what a trainer publishes of them."""
    files = safetensors_files(directory)
    random, tensors = torch.Generator().manual_seed(seed), {}
    matrices = {name: shape for name, shape in shapes_in(files).items() if "_proj." in name and len(shape) == 2}
    for weight, (out, wide) in matrices.items():
        low, high = names_of(weight)
        tensors[low] = torch.randn(rank, wide, generator=random) * 0.3
        tensors[high] = torch.randn(out, rank, generator=random) * 0.3
    save_file(tensors, path, AdaptersHeader(checksum_of(files), scale).metadata)
    return path


def merged(model: nn.Module, image: Path) -> nn.Module:
    """Add an image of adapters to the weights of a model, which is changed."""
    tensors, weights = load_file(image), dict(model.named_parameters())
    with safe_open(image, "pt") as opened:
        header = AdaptersHeader.read(opened.metadata())
    assert header is not None
    for name in {weight_of(each) for each in tensors}:
        assert name is not None
        low, high = (tensors[each] for each in names_of(name))
        weights[name].data.add_(header.scale * (high @ low))
    return model


def scores(model: nn.Module, prompt_ids: Sequence[int], sampled: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """Score sampled tokens by one plain forward pass: log-probabilities at temperature 1."""
    return all_scores(model, prompt_ids, sampled)[np.arange(sampled.size), sampled]


def all_scores(model: nn.Module, prompt_ids: Sequence[int], sampled: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """Score the whole vocabulary at each sampled position: [N, V]."""
    token_ids = torch.tensor([[*prompt_ids, *sampled.tolist()]])
    with torch.inference_mode():
        logits = model(input_ids=token_ids, use_cache=False).logits[0].float()
    return logits.log_softmax(dim=-1)[len(prompt_ids) - 1 : -1].numpy()
