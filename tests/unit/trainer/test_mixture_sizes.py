"""What is predicted to be adapted and packed of a mixture of experts is what is adapted and packed."""

import math
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedConfig, Qwen3MoeConfig

from flotilla.services.trainer.models.lora import Adapters
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.sections.model import LoraConfig
from flotilla.shared.sizes.model import read_sizes
from flotilla.shared.sizes.trainer import trainer_footprint

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
MIXTURES = {
    "qwen3": Qwen3MoeConfig(**COMMON, moe_intermediate_size=16, num_experts=4),
    "mixtral": MixtralConfig(**COMMON, num_local_experts=4),
}


@pytest.mark.parametrize("config", MIXTURES.values(), ids=MIXTURES)
def test_the_attention_alone_is_adapted_and_packed(config: PreTrainedConfig, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    sizes = read_sizes(tmp_path)
    lora = LoraConfig(rank=2)
    attention = sum(each.numel() for name, each in model.named_parameters() if "_proj" in name and "self_attn" in name)
    whole = model.num_parameters()

    spec = validate_spec(
        {
            "name": "mixture",
            "model": {"path": str(tmp_path), "lora": {"rank": 2, "quantisation": {"dtype": "nf4"}}},
            "data": {"path": "rows.jsonl"},
            "reward": {"components": [{"kind": "numeric"}]},
            "optimisation": {"steps": 1},
        }
    )
    parts = {each.name: each.num_bytes for each in trainer_footprint(spec, sizes).parts}
    adapted = Adapters(model, lora, seed=0)

    assert set(sizes.linear()) == set(adapted.layers)
    assert sizes.adapters(lora) == sum(map(math.prod, (each.shape for each in adapted.tensors().values())))
    assert parts["weights"] == pytest.approx(4 * (whole - attention) + attention * 4.13 / 8, abs=1)
