"""Which models the fused forward can run, and their sizes; read from ``config.json`` alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FUSED_MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
# Older checkpoints leave out what equals the default of their class; those defaults are known to transformers alone.
WRITTEN_OUT = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "sliding_window",
)


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes of a model of the Llama family.

    Attributes:
        num_heads, num_kv_heads: query heads, and the key/value heads that groups of them share.
        has_qkv_bias: the query, key and value projections have a bias (Qwen2).
        has_qk_norm: queries and keys are normalised per head (Qwen3).
        is_tied: the head is the embedding.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rope_theta: float
    norm_epsilon: float
    has_qkv_bias: bool
    has_qk_norm: bool
    is_tied: bool


def is_written_out(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration sets every key that the fused forward depends on, and leaves none to defaults."""
    model_type = config.get("model_type")
    needed = [key for key in WRITTEN_OUT if not (key == "sliding_window" and model_type == "llama")]
    needed += ["head_dim"] if model_type == "qwen3" else []
    return all(key in config for key in needed) and "rope_theta" in (config.get("rope_parameters") or config)


def reason_not_fused(config: Mapping[str, Any]) -> str | None:
    """Explain why the fused forward cannot run a model, or None when it can."""
    model_type = config.get("model_type")
    if model_type not in FUSED_MODEL_TYPES:
        return f"model_type {model_type} is not one of {', '.join(sorted(FUSED_MODEL_TYPES))}"
    if config.get("hidden_act", "silu") != "silu":
        return f"hidden_act is {config['hidden_act']}"
    rope = _rope(config)
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        return f"rope_type is {rope.get('rope_type', rope.get('type'))}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return f"partial_rotary_factor is {rope['partial_rotary_factor']}"
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        return "layer_types has other kinds than full_attention"
    if config.get("sliding_window") is not None and (model_type == "mistral" or config.get("use_sliding_window")):
        return f"sliding_window is {config['sliding_window']}"
    if config.get("mlp_bias") or config.get("attention_bias"):
        return "the output or feed-forward projections have a bias"
    if "quantization_config" in config:
        return "the checkpoint is quantised"
    return None


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rotary settings: ``rope_parameters`` since transformers 5, ``rope_scaling`` and ``rope_theta`` before."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {"rope_theta": config.get("rope_theta"), **rope}


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """Read the sizes of a model that ``reason_not_fused`` accepts.

    Args:
        config: complete in the sense of ``is_written_out``.

    Raises:
        ValueError: sizes do not fit each other.
    """
    num_heads = int(config["num_attention_heads"])
    num_kv_heads = int(config["num_key_value_heads"] or num_heads)
    head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise ValueError(f"{num_heads} heads on {num_kv_heads} key/value heads of {head_dim} dims do not fit")
    return Architecture(
        vocab_size=int(config["vocab_size"]),
        hidden_size=int(config["hidden_size"]),
        intermediate_size=int(config["intermediate_size"]),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=int(config["max_position_embeddings"]),
        rope_theta=float(_rope(config)["rope_theta"]),
        norm_epsilon=float(config["rms_norm_eps"]),
        has_qkv_bias=config["model_type"] == "qwen2",
        has_qk_norm=config["model_type"] == "qwen3",
        is_tied=bool(config["tie_word_embeddings"]),
    )
