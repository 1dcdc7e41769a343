"""Weights of the Llama family, laid out for the fused forward and filled from Hugging Face tensors.

Query, key and value projections are one matrix, gate and up another. Within a head, the two halves that rotary
embedding pairs are interleaved, so that the rotation is one complex product; queries and keys are permuted alike, so
attention does not notice. A set of weights that nothing is computed with may be read again, into the same memory.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from flotilla.services.rollout.engines.decoders.architecture import Architecture
from flotilla.services.rollout.engines.decoders.arrival import Tensors
from flotilla.services.rollout.engines.decoders.checkpoint import check_headers
from flotilla.services.rollout.engines.decoders.native.kernels import Kernels
from flotilla.shared.weights.image.digests import Words, as_rows, of_sums, row_sums, sums_of_all

HAS_ONEDNN: bool = torch._C._has_mkldnn
PACKED_ELEMENTS = 1 << 17
"""Smaller matrices stay in the caches of the processor, and a plain product starts faster."""


class Matrix:
    """A weight [out, in], and its bias if it has one. It is read into what ``open`` returns, then packed, and so again.

    Args:
        shape: (out, in).
        dtype, device: of weight and bias.
        has_bias: whether it has one.
        kernels: those that will multiply by it, if any; nothing else can then.
        is_gated: its second half of outputs is multiplied by the activation of the first.
        shared: the weight, where it is another's too, and is read by that one.

    Attributes:
        plain: the weight; None once it is packed, or where native kernels compute.
        bias: [out], or None.
    """

    native: Tensor
    """Packed for the native kernels, if it is; it stays where it is."""
    _places: Tensor

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        has_bias: bool = False,
        kernels: Kernels | None = None,
        is_gated: bool = False,
        shared: Tensor | None = None,
    ) -> None:
        self.shape = shape
        self._dtype, self._device = dtype, device
        self._kernels, self._is_gated, self._shared = kernels, is_gated, shared
        self._sources: list[Tensor] = []
        self.plain: Tensor | None = None
        self._transposed: Tensor | None = None
        self._packed: Tensor | None = None
        # Native kernels compute in float32.
        self.bias = torch.empty(shape[0], dtype=small_dtype(dtype, kernels), device=device) if has_bias else None

    def open(self) -> Tensor:
        """Begin to read the weight, for the first time or again.

        Returns:
            What is to be filled by ``placed``: [out, in], or [out] int64 for the native kernels.
        """
        if self._kernels is not None:
            self._places = torch.empty(self.shape[0], dtype=torch.int64)
            if self._shared is not None:
                self._places.copy_(self.placed(self._shared))
        elif self.plain is None:
            self._packed = None
            whole = self._shared
            if whole is None:
                whole = torch.empty(self.shape, dtype=self._dtype, device=self._device)
            self.plain, self._transposed, self._places = whole, whole.t(), whole
        return self._places

    def close(self) -> None:
        """Release what was read and is not packed."""
        self._sources.clear()

    def placed(self, source: Tensor) -> Tensor:
        """Return what rows [n, in] are in ``open``: themselves, or where they lie, which they do until ``pack``."""
        if self._kernels is None:
            return source
        source = source.to(self._dtype).contiguous()
        self._sources.append(source)
        return source.data_ptr() + torch.arange(source.shape[0]) * (source.shape[1] * source.itemsize)

    def pack(self) -> None:
        """Pack the weight, which has been read, where that pays."""
        if self._kernels is not None:
            packed = (self._places, self.shape[1], self._dtype)
            self.native = self._kernels.pack(*packed, is_gated=self._is_gated, into=getattr(self, "native", None))
            self._sources.clear()
            return
        weight = self._places
        is_small = weight.numel() < PACKED_ELEMENTS
        if is_small or weight.device.type != "cpu" or weight.dtype != torch.float32 or not HAS_ONEDNN:
            return
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        self.plain = self._transposed = None
        self._places = weight.new_empty(0)  # it is freed

    @property
    def is_copy(self) -> bool:
        """Whether the weight is another's too, and a copy of it serves here."""
        return self._shared is not None and self.plain is None

    def numbers(self) -> Tensor:
        """Number the rows: [out], which parts of the matrix are found by as in what ``open`` returns."""
        return torch.arange(self.shape[0])

    def sums(self) -> Words:
        """Sum the rows as they are in memory now: [out]; see ``digests``."""
        if self._kernels is not None:
            return self._kernels.row_sums(self.native, self.shape, is_gated=self._is_gated)
        return row_sums(_unpacked(self) if self._packed is None else self._packed.to_dense())

    def __call__(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Multiply rows [B, in]: [B, out]; written to ``out``, if that is given."""
        if out is not None:
            if self._transposed is None or self.bias is not None:
                return out.copy_(self(hidden))
            return torch.mm(hidden, self._transposed, out=out)
        if self._packed is None:
            assert self.plain is not None
            return functional.linear(hidden, self.plain, self.bias)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self._packed, self.bias, "none", [], "")
        return product

    def add_to(self, total: Tensor, hidden: Tensor) -> None:
        """Add the product of rows [B, in] to ``total`` [B, out], in place."""
        if self._transposed is not None and self.bias is None:
            total.addmm_(hidden, self._transposed)
        else:
            total.add_(self(hidden))


def small_dtype(dtype: torch.dtype, kernels: Kernels | None) -> torch.dtype:
    """Return the type of norms and biases where weights have a given one: native kernels read them in float32."""
    return dtype if kernels is None else torch.float32


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
    """Where a checkpoint tensor goes.

    Attributes:
        shape: that it has there.
        source_view: the shape to view it as; of a matrix, the shape to view its rows as.
        view: of ours, which it fills.
        matrix: that it is a part of, if any; then the view is of what ``Matrix.open`` returned.
    """

    shape: tuple[int, ...]
    source_view: tuple[int, ...]
    view: Tensor
    matrix: Matrix | None = None

    def fill(self, tensor: Tensor) -> None:
        """Take the tensor over."""
        placed = tensor if self.matrix is None else self.matrix.placed(tensor)
        self.view.copy_(placed.view(self.source_view))


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
        width = (sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_dim
        self._architecture, self._dtype = sizes, dtype

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=small_dtype(dtype, kernels), device=device)

        def matrix(outputs: int, inputs: int, *, has_bias: bool = False, is_gated: bool = False) -> Matrix:
            shape = (outputs, inputs)
            return Matrix(shape, dtype, device, has_bias=has_bias, kernels=kernels, is_gated=is_gated)

        self.embedding = torch.empty((sizes.vocab_size, sizes.hidden_size), dtype=dtype, device=device)
        self.layers = [
            LayerWeights(
                input_norm=empty(sizes.hidden_size),
                qkv=matrix(width, sizes.hidden_size, has_bias=sizes.has_qkv_bias),
                qk_norm=empty(sizes.num_heads + sizes.num_kv_heads, sizes.head_dim) if sizes.has_qk_norm else None,
                output=matrix(sizes.hidden_size, sizes.num_heads * sizes.head_dim),
                post_norm=empty(sizes.hidden_size),
                gate_up=matrix(2 * sizes.intermediate_size, sizes.hidden_size, is_gated=True),
                down=matrix(sizes.hidden_size, sizes.intermediate_size),
            )
            for _ in range(sizes.num_layers)
        ]
        self.final_norm = empty(sizes.hidden_size)
        shared = self.embedding if sizes.is_tied else None
        self.head = Matrix((sizes.vocab_size, sizes.hidden_size), dtype, device, kernels=kernels, shared=shared)

    def fill(self, source: Tensors) -> None:
        """Fill the weights; headers are checked before the first byte is copied.

        A matrix is packed as soon as it is there, so nothing waits for the last byte.

        Raises:
            WeightTransferFailed: a tensor cannot be read, or names, shapes or dtypes do not fit.
        """
        targets = dict(self._targets(Matrix.open))
        left = Counter(id(target.matrix) for target in targets.values())
        expected = {name: target.shape for name, target in targets.items()}
        rotary = {f"model.layers.{number}.self_attn.rotary_emb.inv_freq" for number in range(len(self.layers))}
        tied = {"lm_head.weight"} if self._architecture.is_tied else set()
        with torch.inference_mode(), ExitStack() as stack:
            for matrix in self._matrices():
                stack.callback(matrix.close)
            check_headers(source.headers, expected, optional=frozenset(rotary | tied))
            for name in source.headers:
                if name not in targets:
                    continue
                target = targets.pop(name)
                target.fill(source.read(name))
                left[id(target.matrix)] -= 1
                if target.matrix is not None and not left[id(target.matrix)]:
                    target.matrix.pack()
                elif tied and target.view is self.embedding:
                    self.head.open()
                    self.head.pack()

    def digests(self) -> Iterator[tuple[str, int]]:
        """Digest what is in memory now, by the names of the checkpoint; matrices part by part."""
        targets = list(self._targets(Matrix.numbers))
        matrices = {id(each.matrix): each.matrix for _, each in targets if each.matrix is not None}
        if self.head.is_copy:
            matrices[id(self.head)] = self.head
        sums = {key: each.sums() for key, each in matrices.items() if each.plain is None}
        plain = {key: each.plain for key, each in matrices.items() if each.plain is not None}
        # A norm of heads is there once for each of them.
        alone = [each.view.to(self._dtype).reshape(-1, *each.shape) for _, each in targets if each.matrix is None]
        # All together: each alone would be waited for, where a GPU computes.
        found = iter(sums_of_all([*plain.values(), *(as_rows(each) for copies in alone for each in copies)]))
        sums |= {key: next(found) for key in plain}
        for name, target in targets:
            if target.matrix is None:
                yield from ((name, of_sums(next(found))) for _ in range(target.view.numel() // prod(target.shape)))
            else:
                yield name, of_sums(sums[id(target.matrix)][target.view.reshape(-1).numpy()])
        if self.head.is_copy:
            yield "model.embed_tokens.weight", of_sums(sums[id(self.head)])

    def tensors(self) -> Iterator[Tensor]:
        """List all tensors, in an order that depends on the architecture alone; where matrices are not packed."""
        yield self.embedding
        yield self.final_norm
        for matrix in self._matrices():
            yield _unpacked(matrix)
            if matrix.bias is not None:
                yield matrix.bias
        for layer in self.layers:
            yield layer.input_norm
            yield layer.post_norm
            if layer.qk_norm is not None:
                yield layer.qk_norm

    def _matrices(self) -> Iterator[Matrix]:
        yield self.head
        for each in self.layers:
            yield from (each.qkv, each.output, each.gate_up, each.down)

    def _targets(self, opened: Callable[[Matrix], Tensor]) -> Iterator[tuple[str, Target]]:
        yield "model.embed_tokens.weight", _plain(self.embedding)
        yield "model.norm.weight", _plain(self.final_norm)
        if not self._architecture.is_tied:
            yield "lm_head.weight", _whole(self.head, opened)
        for number, each in enumerate(self.layers):
            yield from self._layer_targets(f"model.layers.{number}.", each, opened)

    def _layer_targets(
        self, prefix: str, layer: LayerWeights, opened: Callable[[Matrix], Tensor]
    ) -> Iterator[tuple[str, Target]]:
        yield f"{prefix}input_layernorm.weight", _plain(layer.input_norm)
        yield f"{prefix}post_attention_layernorm.weight", _plain(layer.post_norm)
        yield f"{prefix}self_attn.o_proj.weight", _whole(layer.output, opened)
        gate, up = opened(layer.gate_up).chunk(2)
        yield f"{prefix}mlp.gate_proj.weight", _rows(layer.gate_up, gate)
        yield f"{prefix}mlp.up_proj.weight", _rows(layer.gate_up, up)
        yield f"{prefix}mlp.down_proj.weight", _whole(layer.down, opened)
        yield from self._attention_targets(f"{prefix}self_attn.", layer, opened(layer.qkv))

    def _attention_targets(self, prefix: str, layer: LayerWeights, rows: Tensor) -> Iterator[tuple[str, Target]]:
        sizes = self._architecture
        queries, keys = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        query, key, value = torch.split(rows, [queries, keys, keys])
        yield f"{prefix}q_proj.weight", _rows(layer.qkv, query, sizes.num_heads)
        yield f"{prefix}k_proj.weight", _rows(layer.qkv, key, sizes.num_kv_heads)
        yield f"{prefix}v_proj.weight", _rows(layer.qkv, value)
        if layer.qkv.bias is not None:
            query, key, value = torch.split(layer.qkv.bias, [queries, keys, keys])
            yield f"{prefix}q_proj.bias", _viewed((queries,), _interleaved(query, sizes.num_heads))
            yield f"{prefix}k_proj.bias", _viewed((keys,), _interleaved(key, sizes.num_kv_heads))
            yield f"{prefix}v_proj.bias", _plain(value)
        if layer.qk_norm is not None:
            heads = torch.split(layer.qk_norm, [sizes.num_heads, sizes.num_kv_heads])
            for kind, norm in zip(("q_norm", "k_norm"), heads, strict=True):
                halves = norm.view(norm.shape[0], -1, 2).transpose(1, 2)
                yield f"{prefix}{kind}.weight", Target((sizes.head_dim,), (2, sizes.head_dim // 2), halves)


def _unpacked(matrix: Matrix) -> Tensor:
    assert matrix.plain is not None, "it is packed"
    return matrix.plain


def _plain(tensor: Tensor) -> Target:
    return _viewed(tuple(tensor.shape), tensor)


def _viewed(shape: tuple[int, ...], view: Tensor) -> Target:
    return Target(shape, tuple(view.shape), view)


def _whole(matrix: Matrix, opened: Callable[[Matrix], Tensor]) -> Target:
    return _rows(matrix, opened(matrix))


def _rows(matrix: Matrix, places: Tensor, num_heads: int | None = None) -> Target:
    view = places if num_heads is None else _interleaved(places, num_heads)
    return Target((places.shape[0], matrix.shape[1]), tuple(view.shape), view, matrix)


def _interleaved(tensor: Tensor, num_heads: int) -> Tensor:
    return tensor.view(num_heads, -1, 2, *tensor.shape[1:]).transpose(1, 2)
