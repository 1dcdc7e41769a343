"""Weights that are read one tensor at a time: each matrix is packed as soon as it is there, whatever comes later."""

from typing import Any

import torch
from torch import Tensor

from flotilla.services.rollout.engines.decoders.architecture import Architecture
from flotilla.services.rollout.engines.decoders.checkpoint import TensorHeader
from flotilla.services.rollout.engines.decoders.fused_weights import FusedWeights

SIZES = Architecture(
    vocab_size=10,
    hidden_size=8,
    intermediate_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    max_positions=16,
    rope_theta=10_000.0,
    norm_epsilon=1e-6,
    has_qkv_bias=False,
    has_qk_norm=False,
    is_tied=True,
)
OF_A_LAYER = {
    "input_layernorm": (8,),
    "self_attn.q_proj": (8, 8),
    "self_attn.k_proj": (4, 8),
    "self_attn.v_proj": (4, 8),
    "self_attn.o_proj": (8, 8),
    "post_attention_layernorm": (8,),
    "mlp.gate_proj": (16, 8),
    "mlp.up_proj": (16, 8),
    "mlp.down_proj": (8, 16),
}


class Recorded:
    """Kernels and tensors that write down what happens to them, in one list."""

    def __init__(self) -> None:
        layers = {f"model.layers.{n}.{name}.weight": shape for n in range(2) for name, shape in OF_A_LAYER.items()}
        shapes = {"model.embed_tokens.weight": (10, 8), **layers, "model.norm.weight": (8,)}
        self.headers = {name: TensorHeader("F32", shape) for name, shape in shapes.items()}
        self.events: list[str] = []
        self.memory: list[int] = []

    def read(self, name: str) -> Tensor:
        self.events.append(name)
        return torch.zeros(self.headers[name].shape)

    def pack(
        self, rows: Tensor, depth: int, dtype: torch.dtype, *, is_gated: bool = False, into: Tensor | None = None
    ) -> Tensor:
        self.events.append("packed")
        packed = torch.empty(rows.shape[0], depth, dtype=dtype) if into is None else into
        self.memory.append(packed.data_ptr())
        return packed


def test_a_matrix_is_packed_before_the_next_one_is_read() -> None:
    recorded: Any = Recorded()

    FusedWeights(SIZES, torch.float32, torch.device("cpu"), recorded).fill(recorded)

    first, *others = list(recorded.headers)
    expected = [first, "packed"]  # the embedding is the head as well
    for name in others:
        is_last = name.endswith(("v_proj.weight", "o_proj.weight", "up_proj.weight", "down_proj.weight"))
        expected += [name, "packed"] if is_last else [name]
    assert recorded.events == expected


def test_weights_that_are_read_again_take_the_same_memory() -> None:
    recorded: Any = Recorded()
    weights = FusedWeights(SIZES, torch.float32, torch.device("cpu"), recorded)
    weights.fill(recorded)
    first, recorded.memory = recorded.memory, []

    weights.fill(recorded)

    assert recorded.memory == first
