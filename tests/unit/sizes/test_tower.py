"""Sizes of a model of tiles, whose files name the language model's weights below their own prefix."""

from flotilla.shared.config.sections.model import LoraConfig
from flotilla.shared.sizes.model import sizes_of

CONFIG = {
    "model_type": "internvl",
    "text_config": {
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 30,
        "intermediate_size": 16,
        "tie_word_embeddings": False,
    },
}
SHAPES = {
    "language_model.model.embed_tokens.weight": (30, 8),
    "language_model.model.layers.0.self_attn.q_proj.weight": (8, 8),
    "language_model.lm_head.weight": (30, 8),
    "vision_tower.encoder.layer.0.attention.q_proj.weight": (32, 32),
    "multi_modal_projector.linear_1.weight": (8, 128),
}


def test_a_head_below_a_prefix_is_one_and_a_tower_has_no_adapters() -> None:
    found = sizes_of(CONFIG, SHAPES)

    assert not found.is_tied
    assert found.parameters == 2 * 240 + 64 + 1024 + 1024
    assert found.as_scorer().parameters == found.parameters - 240
    assert list(found.adapted(LoraConfig(rank=2))) == ["language_model.model.layers.0.self_attn.q_proj"]
