"""The forward pass by the native kernels: one call for all layers of any tokens, be they one per row or many of one.

Keys are kept in blocks of ``SPAN_STEP`` positions, dims first (``attention.h``), so the cache copies whole blocks.
"""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flotilla.services.rollout.engines.decoders.architecture import Architecture
from flotilla.services.rollout.engines.decoders.base import Tokens
from flotilla.services.rollout.engines.decoders.fused_weights import FusedWeights
from flotilla.services.rollout.engines.decoders.kv_cache import KeyValueCache
from flotilla.services.rollout.engines.decoders.native.kernels import Kernels, LayerPointers, ModelPointers

AT_ONCE = 256
"""Tokens of a prefill that pass through all layers together: so their activations fit the processor's caches."""


class NativeForward:
    """Runs the model; nothing is computed before ``use``.

    Args:
        kernels: the library.
        architecture: the sizes.
        rotations: [P, D / 2] complex64.
        cache: keys and values.
        num_rows: rows of the cache.
    """

    def __init__(
        self, kernels: Kernels, architecture: Architecture, rotations: Tensor, cache: KeyValueCache, num_rows: int
    ) -> None:
        self._kernels = kernels
        self._sizes = architecture
        self._rotations = rotation_table(rotations)
        self._cache = cache
        self._at_once = max(num_rows, AT_ONCE)
        self._rows = torch.arange(num_rows)
        self._num_rows = num_rows
        self._weights: FusedWeights | None = None
        self.release()

    @property
    def gains_by_threads(self) -> bool:
        """Whether a token of every row is large enough for several threads."""
        sizes = self._sizes
        widest = max(sizes.vocab_size, sizes.intermediate_size)
        return self._kernels.is_worth_threads(self._num_rows, sizes.hidden_size, widest)

    def use(self, weights: FusedWeights) -> None:
        """Compute with these weights from now on."""
        sizes = self._sizes
        self._weights = weights
        self._generation = -1
        self._layers = (LayerPointers * sizes.num_layers)()
        for layer, pointers in zip(weights.layers, self._layers, strict=True):
            pointers.input_norm, pointers.post_norm = layer.input_norm.data_ptr(), layer.post_norm.data_ptr()
            pointers.head_norms = None if layer.qk_norm is None else layer.qk_norm.data_ptr()
            pointers.qkv_bias = None if layer.qkv.bias is None else layer.qkv.bias.data_ptr()
            pointers.qkv, pointers.output = layer.qkv.native.data_ptr(), layer.output.native.data_ptr()
            pointers.gate_up, pointers.down = layer.gate_up.native.data_ptr(), layer.down.native.data_ptr()
        self._model = ModelPointers(
            *(ctypes.addressof(self._layers), weights.embedding.data_ptr(), weights.final_norm.data_ptr()),
            *(weights.head.native.data_ptr(), self._rotations.data_ptr(), sizes.norm_epsilon, sizes.num_layers),
            *(sizes.hidden_size, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim),
            *(sizes.intermediate_size, sizes.vocab_size),
        )

    def release(self) -> None:
        """Free weights and what is computed with."""
        self._weights = None
        self._work = self._logits = torch.empty(0)
        self._caches: tuple[object, object, int] = (None, None, 0)
        self._generation = -1

    def decode(self, token_ids: Tensor, lengths: Tensor, longest: int) -> Tensor:
        """Append one token to each of the first B rows; see ``Decoder.decode``."""
        self._reserve(longest + 1)
        num = token_ids.shape[0]
        if not self._logits.numel():
            self._logits = torch.empty(self._num_rows, self._sizes.vocab_size)
        logits = self._logits[:num]
        self._run((token_ids, self._rows[:num], lengths, None), logits)
        return logits

    def prefill(self, sequences: Sequence[Tokens], rows: Sequence[Sequence[int]], starts: Sequence[int]) -> Tensor:
        """Compute sequences, each from where its first row holds it; see ``Decoder.prefill``."""
        self._reserve(max(sequence.shape[0] for sequence in sequences))
        new = [sequence[start:] for sequence, start in zip(sequences, starts, strict=True)]
        counts = np.array([tokens.shape[0] for tokens in new])
        wanted = np.zeros(counts.sum(), dtype=np.int64)
        wanted[counts.cumsum() - 1] = 1
        tokens = (
            np.concatenate(new),
            np.repeat([group[0] for group in rows], counts),
            np.concatenate([np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]),
            wanted,
        )
        logits = torch.empty(len(sequences), self._sizes.vocab_size)
        ids, first_rows, places, flags = (torch.from_numpy(each) for each in tokens)
        self._run((ids, first_rows, places, flags), logits)
        self._share([sequence.shape[0] for sequence in sequences], rows)
        return logits

    def _share(self, lengths: Sequence[int], rows: Sequence[Sequence[int]]) -> None:
        """Copy what the first row of each group holds to the others."""
        sources = [group[0] for group in rows for _ in group[1:]]
        targets = [row for group in rows for row in group[1:]]
        if targets:
            longest = max(length for length, group in zip(lengths, rows, strict=True) if len(group) > 1)
            self._cache.move_rows(sources, targets, longest)

    def _reserve(self, num_tokens: int) -> None:
        self._cache.reserve(num_tokens)
        if self._generation != self._cache.generation:
            self._generation = self._cache.generation
            num, pointer = self._sizes.num_layers, ctypes.c_void_p
            keys, values = zip(*(self._cache.layer(number) for number in range(num)), strict=True)
            pointers = ((pointer * num)(*(each.data_ptr() for each in caches)) for caches in (keys, values))
            self._caches = (*pointers, keys[0].shape[2])
            size = self._kernels.work_size(self._model, self._caches[2], self._at_once)
            self._work = torch.empty(size)

    def _run(self, tokens: tuple[Tensor, Tensor, Tensor, Tensor | None], logits: Tensor) -> None:
        assert self._weights is not None
        self._kernels.forward(self._model, self._caches, tokens, self._at_once, self._work, logits)


def rotation_table(rotations: Tensor) -> Tensor:
    """Lay rotations [P, D / 2] complex64 out as the kernels read them: cosines and signed sines, [P, 2, D] float32."""
    sines = torch.stack([-rotations.imag, rotations.imag], dim=-1).flatten(1)
    return torch.stack([rotations.real.repeat_interleave(2, dim=1), sines], dim=1).contiguous()
