"""The models that benchmarks run: Qwen3's architecture in several sizes, with random weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

SIZES: Final[Mapping[str, Mapping[str, int]]] = {
    "tiny": {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 256, "vocab_size": 428,
    },
    "29M": {
        "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
        "intermediate_size": 1536, "vocab_size": 8192,
    },
    "36M": {
        "hidden_size": 512, "num_hidden_layers": 10, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
        "intermediate_size": 1536, "vocab_size": 8192,
    },
    "150M": {
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4,
        "head_dim": 64, "intermediate_size": 2304, "vocab_size": 65536,
    },
    "250M": {
        "hidden_size": 1024, "num_hidden_layers": 15, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 3072, "vocab_size": 16384,
    },
    "0.6B": {
        "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936,
    },
}  # fmt: skip
"""0.6B is the shape of Qwen3-0.6B."""


def write_model(directory: Path, size: str, dtype: str = "float32") -> Path:
    """Write a model, without a tokenizer."""
    # Here: whoever only reads sizes has its memory measured.
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(**SIZES[size], max_position_embeddings=4096, tie_word_embeddings=True)
    made = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    made.save_pretrained(directory)
    return directory
