"""The config of a model in Hugging Face format, made tiny: what says how large it is changes, the kind stays."""

from collections.abc import Mapping
from typing import Any, Final

from flotilla.shared.vision.kinds import GRID_MODELS

Section = Mapping[str, Any]
"""Of a config."""
Value = Any
HIDDEN, HEADS, KEY_VALUE_HEADS, HEAD_DIM = 64, 4, 2, 16
NUM_LAYERS: Final = 2
NUM_EXPERTS: Final = 4
PATCH: Final = 4
VISION_SECTIONS: Final = ("vision_config",)
SIZES: Final[Mapping[str, int]] = {
    "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KEY_VALUE_HEADS, "head_dim": HEAD_DIM,
    "query_pre_attn_scalar": HEAD_DIM, "max_window_layers": NUM_LAYERS, "sliding_window": 4096,
    # Latent attention of DeepSeek.
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": HEAD_DIM, "qk_rope_head_dim": HEAD_DIM,
    "v_head_dim": HEAD_DIM, "qk_head_dim": 2 * HEAD_DIM,
    # Experts.
    "num_experts": NUM_EXPERTS, "num_local_experts": NUM_EXPERTS, "n_routed_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
    # Linear attention of Qwen3-Next.
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
"""What each is at most; what a config leaves empty stays so."""
TOWER: Final[Section] = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": PATCH, "window_size": 16,
    "out_hidden_size": HIDDEN, "num_position_embeddings": 16, "embed_dim": 32, "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0], "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
"""The same of a tower for images."""


def shrunk(config: Section, **exact: int) -> dict[str, Value]:
    """Make a config tiny.

    Args:
        config: as config.json has it; sections for text and images are made tiny, too.
        exact: keys that get these values where they are, such as the vocabulary's size.
    """
    found = dict(config)
    for key, value in config.items():
        if key in VISION_SECTIONS and isinstance(value, Mapping):
            found[key] = {name: TOWER.get(name, each) for name, each in value.items()}
            # What Qwen2-VL's tower calls the width of the text's model.
            if "embed_dim" in value:
                found[key]["hidden_size"] = HIDDEN
        elif key == "text_config" and isinstance(value, Mapping):
            found[key] = shrunk(value, **exact)
        elif key in exact:
            found[key] = exact[key]
        elif key in SIZES and isinstance(value, int) and not isinstance(value, bool):
            found[key] = min(value, SIZES[key])
    if config.get("num_key_value_heads") == config.get("num_attention_heads") and "num_key_value_heads" in found:
        found["num_key_value_heads"] = found["num_attention_heads"]  # as many as before: all of them
    return _with_positions(_with_layers(found))


def _with_layers(config: dict[str, Value]) -> dict[str, Value]:
    """Keep one layer of each kind, two at least."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and kinds:
        chosen = [*dict.fromkeys(kinds)]
        chosen += chosen[-1:] * (NUM_LAYERS - len(chosen))
        config |= {"layer_types": chosen, "num_hidden_layers": len(chosen)}
    for name in ("mlp_only_layers", "no_rope_layers"):
        if isinstance(config.get(name), list):
            config[name] = [each for each in config[name] if isinstance(each, int) and each < 1]
    types = config.get("mlp_layer_types")
    if isinstance(types, list) and types:
        config["mlp_layer_types"] = [types[0], types[-1]][: config["num_hidden_layers"]]
    return config


def _with_positions(config: dict[str, Value]) -> dict[str, Value]:
    """Divide a head among the axes of positions, where there are several."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    is_grid = str(config.get("model_type", "")).removesuffix("_text") in GRID_MODELS and "text_config" not in config
    if not isinstance(rope, Mapping) or not ("mrope_section" in rope or is_grid):
        return config
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    half = int(head * rope.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1)) // 2
    side = max(half // 4, 0)
    name = "rope_scaling" if config.get("rope_scaling") and not config.get("rope_parameters") else "rope_parameters"
    config[name] = {
        "rope_type": "default",
        "rope_theta": 1e4,
        **rope,
        "mrope_section": [half - 2 * side, side, side],
    }
    return config
