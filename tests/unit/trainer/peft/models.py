"""The models whose adapters peft merged: small enough for files in a repository."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from tests.unit.trainer.builders import VOCABULARY


def _qwen3() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "head_dim": 4, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, initializer_range=0.2, tie_word_embeddings=True)).eval()


def _gpt2() -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 128, "vocab_size": VOCABULARY}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, initializer_range=0.2)).eval()


MODELS: Mapping[str, Callable[[], nn.Module]] = {"qwen3": _qwen3, "gpt2": _gpt2}
LORA: Mapping[str, dict[str, Any]] = {
    "qwen3": {"rank": 3, "alpha": 8.0},
    "gpt2": {"rank": 2, "alpha": 4.0, "targets": ["c_attn", "mlp.c_proj"], "rank_stabilised": True},
}
