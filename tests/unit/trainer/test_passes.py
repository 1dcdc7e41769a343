"""What a pass is predicted to keep is what autograd keeps of it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.models.loading import LoadedModel
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.schemas.trajectory import FinishReason, Group, Trajectory
from flotilla.shared.sizes.model import sizes_of
from flotilla.shared.sizes.passes import How, PassSizes, kept_bytes
from flotilla.shared.testing.builders import a_task, graded

PROMPT, SAMPLED, MEMBERS = 16, 112, 8
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 192,
    "vocab_size": 64,
    "tie_word_embeddings": True,
}


def a_group() -> Group:
    random = np.random.default_rng(0)
    prompt = random.integers(2, 64, PROMPT)
    members = [
        Trajectory(
            token_ids=np.concatenate([prompt, random.integers(2, 64, SAMPLED)]).astype(np.int32),
            loss_mask=np.array([0] * PROMPT + [1] * SAMPLED, dtype=np.uint8),
            log_probs=np.array([0.0] * PROMPT + [-4.0] * SAMPLED, dtype=np.float32),
            versions=((0, 0),),
            finish_reason=FinishReason.STOP,
            text="",
        )
        for _ in range(MEMBERS)
    ]
    return graded(
        Group(a_task(0, group_size=MEMBERS), tuple(members)), [float(number % 2) for number in range(MEMBERS)]
    )


def saved_bytes(learner: Learner) -> int:
    """Train a step; bytes of the storages that autograd saves, without those of weights."""
    weights = {each.untyped_storage().data_ptr() for each in learner.loaded.model.parameters()}
    kept: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            # Held, so that no other tensor takes its place.
            kept[storage.data_ptr()] = storage.nbytes(), tensor.detach()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        learner.train([a_group()], 1)
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("config", [Qwen3Config, LlamaConfig])
@pytest.mark.parametrize("lora", [None, {"rank": 2}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_autograd_keeps_is_predicted(config: type, lora: object, dtype: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config(**SIZES), dtype=getattr(torch, dtype)).eval()
    spec = validate_spec(
        {
            "name": "kept",
            "model": {"path": str(tmp_path), "lora": lora, "dtype": dtype},
            "data": {"path": "rows.jsonl"},
            "reward": {"components": [{"kind": "numeric"}]},
            "rollout": {"group_size": MEMBERS},
            "samples": None,
            "optimisation": {"steps": 2, "groups_per_mini_batch": 1, "micro_batch_tokens": 4096},
        }
    )
    found = saved_bytes(Learner(spec, LoadedModel(made, tmp_path)))

    shapes = {name: tuple(each.shape) for name, each in made.named_parameters() if "lora" not in name}
    sizes = sizes_of({**SIZES, "rms_norm_eps": 1e-6}, shapes)
    positions, slots = PROMPT + MEMBERS * SAMPLED, MEMBERS * (PROMPT + SAMPLED)
    how = How(size=4 if dtype == "float32" else 2, is_native=True, recomputes=False, trains_head=lora is None)
    expected = kept_bytes(sizes, PassSizes(positions, slots, MEMBERS * SAMPLED, MEMBERS), how)
    assert found == pytest.approx(expected, rel=0.12)
