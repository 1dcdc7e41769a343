"""Weights of the Llama family, laid out for the fused forward and filled from Hugging Face tensors.

Query, key and value projections are one matrix, gate and up another. Within a head, the two halves that rotary
embedding pairs are interleaved, so that the rotation is one complex product; queries and keys are permuted alike, so
attention does not notice. Each set of weights is read once: new ones are another set.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from services.rollout.engines.decoders.architecture import Architecture
from services.rollout.engines.decoders.arrival import Tensors
from services.rollout.engines.decoders.checkpoint import check_headers
from services.rollout.engines.decoders.matrices import Matrix
from services.rollout.engines.decoders.native.kernels import Kernels


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer.

    Attributes:
        qk_norm: [H + Hkv, D], or None.
    """

    input_norm: Tensor
    qkv: Matrix
    qk_norm: Tensor | None
    output: Matrix
    post_norm: Tensor
    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class Target:
    """Where a checkpoint tensor goes: its shape there, the shape to view it as, and the view of ours that it fills."""

    shape: tuple[int, ...]
    source_view: tuple[int, ...]
    view: Tensor


class FusedWeights:
    """All weights of a model, and where each tensor of a checkpoint goes.

    Args:
        architecture: the sizes.
        dtype, device: of the weights.
        kernels: the native kernels, if they are to multiply by them.
    """

    def __init__(
        self, architecture: Architecture, dtype: torch.dtype, device: torch.device, kernels: Kernels | None = None
    ) -> None:
        sizes = architecture
        self._kernels = kernels
        width = (sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_dim
        self._architecture = sizes

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.embedding = empty(sizes.vocab_size, sizes.hidden_size)
        self.layers = [
            LayerWeights(
                input_norm=empty(sizes.hidden_size),
                qkv=Matrix(empty(width, sizes.hidden_size), empty(width) if sizes.has_qkv_bias else None),
                qk_norm=empty(sizes.num_heads + sizes.num_kv_heads, sizes.head_dim) if sizes.has_qk_norm else None,
                output=Matrix(empty(sizes.hidden_size, sizes.num_heads * sizes.head_dim)),
                post_norm=empty(sizes.hidden_size),
                gate_up=Matrix(empty(2 * sizes.intermediate_size, sizes.hidden_size)),
                down=Matrix(empty(sizes.hidden_size, sizes.intermediate_size)),
            )
            for _ in range(sizes.num_layers)
        ]
        self.final_norm = empty(sizes.hidden_size)
        self.head = Matrix(self.embedding if sizes.is_tied else empty(sizes.vocab_size, sizes.hidden_size))

    def fill(self, source: Tensors) -> None:
        """Fill the weights, once; headers are checked before the first byte is copied.

        A layer is packed as soon as it is there: what was read of it is freed, and nothing waits for the last byte.

        Raises:
            WeightTransferFailed: a tensor cannot be read, or names, shapes or dtypes do not fit.
        """
        targets, layer_of = dict(self._other_targets()), dict[str, LayerWeights]()
        for number, each in enumerate(self.layers):
            of_layer = dict(self._layer_targets(f"model.layers.{number}.", each))
            targets |= of_layer
            layer_of |= dict.fromkeys(of_layer, each)
        left = Counter(map(id, layer_of.values()))
        expected = {name: target.shape for name, target in targets.items()}
        rotary = {f"model.layers.{number}.self_attn.rotary_emb.inv_freq" for number in range(len(self.layers))}
        tied = {"lm_head.weight"} if self._architecture.is_tied else set()
        with torch.inference_mode():
            check_headers(source.headers, expected, optional=frozenset(rotary | tied))
            for name in source.headers:
                if name not in targets:
                    continue
                _fill(targets.pop(name), source.read(name))
                if (layer := layer_of.get(name)) is not None:
                    left[id(layer)] -= 1
                    if not left[id(layer)]:
                        self._pack(layer)
            self.head.pack(self._kernels)

    def _pack(self, layer: LayerWeights) -> None:
        # One after the other: what is packed is freed.
        for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down):
            matrix.pack(self._kernels, is_gated=matrix is layer.gate_up)

    def tensors(self) -> Iterator[Tensor]:
        """List all tensors, in an order that depends on the architecture alone; where matrices are not packed."""
        yield self.embedding
        yield self.final_norm
        for matrix in [
            self.head,
            *(m for each in self.layers for m in (each.qkv, each.output, each.gate_up, each.down)),
        ]:
            yield _unpacked(matrix)
            if matrix.bias is not None:
                yield matrix.bias
        for layer in self.layers:
            yield layer.input_norm
            yield layer.post_norm
            if layer.qk_norm is not None:
                yield layer.qk_norm

    def _other_targets(self) -> Iterator[tuple[str, Target]]:
        yield "model.embed_tokens.weight", _plain(self.embedding)
        yield "model.norm.weight", _plain(self.final_norm)
        if not self._architecture.is_tied:
            yield "lm_head.weight", _matrix(self.head)

    def _layer_targets(self, prefix: str, layer: LayerWeights) -> Iterator[tuple[str, Target]]:
        yield f"{prefix}input_layernorm.weight", _plain(layer.input_norm)
        yield f"{prefix}post_attention_layernorm.weight", _plain(layer.post_norm)
        yield f"{prefix}self_attn.o_proj.weight", _matrix(layer.output)
        gate, up = _unpacked(layer.gate_up).chunk(2)
        yield f"{prefix}mlp.gate_proj.weight", _plain(gate)
        yield f"{prefix}mlp.up_proj.weight", _plain(up)
        yield f"{prefix}mlp.down_proj.weight", _matrix(layer.down)
        yield from self._attention_targets(f"{prefix}self_attn.", layer)

    def _attention_targets(self, prefix: str, layer: LayerWeights) -> Iterator[tuple[str, Target]]:
        sizes = self._architecture
        queries, keys = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        for kind, fused in (("weight", _unpacked(layer.qkv)), ("bias", layer.qkv.bias)):
            if fused is not None:
                query, key, value = torch.split(fused, [queries, keys, keys])
                yield f"{prefix}q_proj.{kind}", _interleaved(query, sizes.num_heads)
                yield f"{prefix}k_proj.{kind}", _interleaved(key, sizes.num_kv_heads)
                yield f"{prefix}v_proj.{kind}", _plain(value)
        if layer.qk_norm is not None:
            heads = torch.split(layer.qk_norm, [sizes.num_heads, sizes.num_kv_heads])
            for kind, norm in zip(("q_norm", "k_norm"), heads, strict=True):
                halves = norm.view(norm.shape[0], -1, 2).transpose(1, 2)
                yield f"{prefix}{kind}.weight", Target((sizes.head_dim,), (2, sizes.head_dim // 2), halves)


def _fill(target: Target, tensor: Tensor) -> None:
    target.view.copy_(tensor.view(target.source_view))


def _unpacked(matrix: Matrix) -> Tensor:
    assert matrix.plain is not None, "weights are filled once"
    return matrix.plain


def _matrix(matrix: Matrix) -> Target:
    return _plain(_unpacked(matrix))


def _plain(tensor: Tensor) -> Target:
    return Target(tuple(tensor.shape), tuple(tensor.shape), tensor)


def _interleaved(tensor: Tensor, num_heads: int) -> Target:
    view = tensor.view(num_heads, -1, 2, *tensor.shape[1:]).transpose(1, 2)
    return Target(tuple(tensor.shape), tuple(view.shape), view)
