"""Tiny models with random weights of each architecture that is trained on several ranks."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY = 32
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}


def _made(name: str, **config: Any) -> Callable[..., nn.Module]:
    def make(**others: Any) -> nn.Module:
        torch.manual_seed(0)
        family = getattr(transformers, f"{name}Config")
        kind = getattr(
            transformers, {"Gemma3Text": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel"}.get(name, f"{name}ForCausalLM")
        )
        model: nn.Module = kind(family(**config | others)).eval()
        return model

    return make


ARCHITECTURES: Mapping[str, Callable[..., nn.Module]] = {
    "Llama": _made("Llama", **COMMON),
    "Qwen2": _made("Qwen2", **COMMON),
    "Qwen3": _made("Qwen3", **COMMON, tie_word_embeddings=True),
    "Mistral": _made("Mistral", **COMMON, sliding_window=None),
    "Gemma 3 text": _made("Gemma3Text", **COMMON),
    "Phi-3": _made("Phi3", **COMMON),
    "GPT-2": _made(
        "GPT2", vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.2
    ),
    "Qwen3-MoE": _made(
        "Qwen3Moe",
        **COMMON,
        **EXPERTS,
        num_experts=4,
        moe_intermediate_size=24,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    "Mixtral": _made("Mixtral", **COMMON, **EXPERTS, num_local_experts=4, sliding_window=None),
}
