"""The fused forward of the Llama family: Llama, Mistral without a window, Qwen2 and Qwen3.

One decode step does little arithmetic, so the number of kernels and of copies decides: projections are fused, rotary
embedding is one complex product, residuals are accumulated by the matrix product itself, and the queries that share
a key/value head form one matrix, so that keys and values are never repeated. Where the native kernels can be used
they compute all of it instead.
"""

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from flotilla.services.rollout.engines.decoders.adapted import BaseWeights, RowAdapters, open_staged
from flotilla.services.rollout.engines.decoders.architecture import Architecture
from flotilla.services.rollout.engines.decoders.arrival import Arrival
from flotilla.services.rollout.engines.decoders.base import KeptRow, Tokens
from flotilla.services.rollout.engines.decoders.fused_weights import FusedWeights, LayerWeights, small_dtype
from flotilla.services.rollout.engines.decoders.kv_cache import KeyValueCache
from flotilla.services.rollout.engines.decoders.native.kernels import Kernels, LayerPointers, ModelPointers, kernels_for
from flotilla.services.rollout.engines.decoders.torch_layers import TorchLayers, rotations

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

    Attributes:
        adapters: of the cache's rows.
    """

    def __init__(
        self, kernels: Kernels, architecture: Architecture, rotations: Tensor, cache: KeyValueCache, num_rows: int
    ) -> None:
        self._kernels = kernels
        self._sizes = architecture
        self._rotations = rotation_table(rotations)
        self._cache = cache
        self._at_once = max(num_rows, AT_ONCE)
        self.adapters = RowAdapters(architecture, num_rows, self._at_once)
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

    @property
    def weights(self) -> FusedWeights:
        """What it computes with."""
        assert self._weights is not None
        return self._weights

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
            *(ctypes.addressof(self._layers), weights.embedding.data_ptr(), weights.head.native.data_ptr()),
            *(weights.final_norm.data_ptr(), self._rotations.data_ptr(), sizes.norm_epsilon, sizes.num_layers),
            *(sizes.hidden_size, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim),
            *(sizes.intermediate_size, sizes.vocab_size, weights.embedding.dtype == torch.bfloat16),
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
        adapters = self.adapters.pointers()
        self._kernels.forward(self._model, self._caches, tokens, self._at_once, self._work, logits, adapters)


def rotation_table(rotations: Tensor) -> Tensor:
    """Lay rotations [P, D / 2] complex64 out as the kernels read them: cosines and signed sines, [P, 2, D] float32."""
    sines = torch.stack([-rotations.imag, rotations.imag], dim=-1).flatten(1)
    return torch.stack([rotations.real.repeat_interleave(2, dim=1), sines], dim=1).contiguous()


class FusedDecoder:
    """A ``Decoder`` for the architectures that ``reason_not_fused`` accepts.

    Args:
        architecture: the sizes.
        files: the safetensors files of the initial weights.
        dtype, device: of the weights; of activations and cache, too, but where native kernels compute, in float32.
        num_rows: rows of the cache.
        context_tokens: the longest row.
        may_be_native: use the native kernels, where they can be had.

    Raises:
        WeightTransferFailed: the files do not fit the architecture.
    """

    def __init__(
        self,
        architecture: Architecture,
        files: list[Path],
        *,
        dtype: torch.dtype,
        device: torch.device,
        num_rows: int,
        context_tokens: int,
        may_be_native: bool = False,
    ) -> None:
        self.vocab_size = architecture.vocab_size
        self.max_positions = architecture.max_positions
        self._kernels = kernels_for(device, dtype) if may_be_native else None
        self.description = "fused forward" if self._kernels is None else "fused forward, native kernels"
        self.is_batch_invariant = self._kernels is not None
        self._sizes = architecture
        self._dtype = dtype
        self._layers = TorchLayers(architecture, dtype)
        self._device = device
        self.base = BaseWeights(files, dtype, device)
        self._spare: FusedWeights | None = None
        # No longer served, or to be replaced: memory for the next ones. To free it takes milliseconds, in which nothing
        # is sampled, and new memory is slower to fill; at the peak there are two copies either way.
        self._unused: FusedWeights | None = None
        computed = small_dtype(dtype, self._kernels)
        self._cache = KeyValueCache(architecture, num_rows, context_tokens, computed, device, self._kernels)
        self._rotations = rotations(architecture, min(context_tokens, architecture.max_positions)).to(device)
        self._native = (
            NativeForward(self._kernels, architecture, self._rotations, self._cache, num_rows)
            if self._kernels is not None
            else None
        )
        self.gains_by_threads = self._native is not None and self._native.gains_by_threads
        self.restore()
        self._scale = architecture.head_dim**-0.5

    def stage(self, image: Path, arrival: Arrival | None = None) -> None:
        """Read a weight image into the spare weights; see ``Decoder.stage``."""
        self._spare = None
        spare = self._memory()
        with open_staged(image, arrival, self.base) as source:
            spare.fill(source)
        self._spare = spare

    def switch(self) -> None:
        """Make the staged weights serve; the memory of the others is for the next ones."""
        assert self._spare is not None
        self._use(self._spare)

    def digests(self) -> Iterator[tuple[str, int]]:
        """Digest what serves; see ``Decoder.digests``."""
        return (self._weights if self._native is None else self._native.weights).digests()

    def discard(self) -> None:
        """Keep the weights as memory for others; see ``Decoder.discard``."""
        self._spare, self._unused = None, self._weights

    def release(self) -> None:
        """Free weights and cache; see ``Decoder.release``."""
        del self._weights  # Nothing may be computed: there is no empty set of weights that could serve.
        self._spare = self._unused = None
        self._cache.release()
        if self._native is not None:
            self._native.release()

    def restore(self) -> None:
        """Read the initial weights; see ``Decoder.restore``."""
        weights = self._memory()
        with self.base.open() as source:
            weights.fill(source)
        self._use(weights)

    def _memory(self) -> FusedWeights:
        return self._unused or FusedWeights(self._sizes, self._dtype, self._device, self._kernels)

    def _use(self, weights: FusedWeights) -> None:
        served = getattr(self, "_weights", None)
        # A GPU's memory is the scarcer, and its allocator keeps what is freed.
        self._unused = served if served is not weights and self._device.type == "cpu" else None
        self._weights, self._spare = weights, None
        if self._native is not None:
            self._native.use(weights)

    @property
    def row_adapters(self) -> RowAdapters | None:
        """Adapters of single rows; see ``AdaptingDecoder``."""
        return None if self._native is None else self._native.adapters

    def move_rows(self, sources: Sequence[int], targets: Sequence[int], longest: int) -> None:
        """Copy the KV of rows to other rows, and assign their adapters to these."""
        self._cache.move_rows(sources, targets, longest)
        if self._native is not None:
            self._native.adapters.move(sources, targets)

    def clear_rows(self, rows: Sequence[int]) -> None:
        """Zero the KV of rows."""
        self._cache.clear_rows(rows)

    def keep(self, row: int, num_tokens: int) -> KeptRow:
        """Copy the KV of the first tokens of a row."""
        return self._cache.keep(row, num_tokens)

    def kept_bytes(self, num_tokens: int) -> int:
        """Count the bytes of what ``keep`` returns."""
        return self._cache.row_bytes(num_tokens)

    @torch.inference_mode()
    def prefill(
        self,
        sequences: Sequence[Tokens],
        rows: Sequence[Sequence[int]],
        kept: Sequence[tuple[KeptRow, int] | None] = (),
    ) -> Tensor:
        """Compute sequences, each behind what was kept of it; see ``Decoder.prefill``."""
        self._cache.reserve(max(sequence.shape[0] for sequence in sequences))
        starts = [0] * len(sequences)
        for index, each in enumerate(kept):
            if each is not None:
                self._cache.put(rows[index][0], *each)
                starts[index] = each[1]
        if self._native is not None:
            return self._native.prefill(sequences, rows, starts)
        fresh = [index for index, start in enumerate(starts) if not start]
        logits = torch.empty((len(sequences), self.vocab_size), dtype=self._dtype, device=self._device)
        if fresh:
            logits[fresh] = self._prefill_whole([sequences[i] for i in fresh], [rows[i] for i in fresh])
        for index, start in enumerate(starts):
            if start:
                logits[index] = self._prefill_behind(sequences[index], rows[index], start)
        return logits

    def _prefill_behind(self, sequence: Tokens, rows: Sequence[int], start: int) -> Tensor:
        """Compute a sequence whose first ``start`` tokens are in the first of its rows: [V]."""
        sizes, weights, row, end = self._sizes, self._weights, rows[0], sequence.shape[0]
        num = end - start
        sees = torch.ones((num, end), dtype=torch.bool, device=self._device).tril(start)
        hidden = functional.embedding(torch.from_numpy(sequence[start:]).to(self._device), weights.embedding)
        for number, layer in enumerate(weights.layers):
            queries, *new = self._project_whole(hidden, layer, (1, num), start)
            caches = self._cache.layer(number)
            for cache, each in zip(caches, new, strict=True):
                cache[row, :, start:end] = each[0]
            keys, values = (cache[row : row + 1, :, :end] for cache in caches)
            mixed = functional.scaled_dot_product_attention(
                queries, keys, values, attn_mask=sees, enable_gqa=sizes.num_heads != sizes.num_kv_heads
            )
            self._layers.feed(hidden, mixed.transpose(1, 2).reshape(num, -1), layer)
        if rows[1:]:
            self._cache.move_rows([row] * len(rows[1:]), rows[1:], end)
        logits: Tensor = self._layers.logits(hidden[-1:], weights)[0]
        return logits

    def _prefill_whole(self, sequences: Sequence[Tokens], rows: Sequence[Sequence[int]]) -> Tensor:
        """Compute sequences from their beginning, padded on the right to the longest: [N, V]."""
        sizes, weights = self._sizes, self._weights
        lengths = torch.tensor([sequence.shape[0] for sequence in sequences], device=self._device)
        num, longest = len(sequences), max(sequence.shape[0] for sequence in sequences)
        padded = torch.zeros((num, longest), dtype=torch.int64)
        for index, sequence in enumerate(sequences):
            padded[index, : sequence.shape[0]] = torch.from_numpy(sequence)
        targets = torch.tensor([row for group in rows for row in group], device=self._device)
        origins = torch.tensor([i for i, group in enumerate(rows) for _ in group], device=self._device)
        hidden = functional.embedding(padded.to(self._device), weights.embedding).view(num * longest, -1)
        for number, layer in enumerate(weights.layers):
            queries, keys, values = self._project_whole(hidden, layer, (num, longest))
            self._cache.write_prefix(number, targets, origins, keys, values)
            mixed = functional.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, enable_gqa=sizes.num_heads != sizes.num_kv_heads
            )
            self._layers.feed(hidden, mixed.transpose(1, 2).reshape(num * longest, -1), layer)
        last = hidden.view(num, longest, -1)[torch.arange(num, device=self._device), lengths - 1]
        return self._layers.logits(last, weights)

    @torch.inference_mode()
    def decode(self, token_ids: Tensor, lengths: Tensor, longest: int) -> Tensor:
        """Append one token to each of the first B rows; see ``Decoder.decode``."""
        if self._native is not None:
            return self._native.decode(token_ids, lengths, longest)
        sizes, weights, lengths = self._sizes, self._weights, lengths.to(self._device)
        num = token_ids.shape[0]
        groups = (num * sizes.num_kv_heads, sizes.num_heads // sizes.num_kv_heads, sizes.head_dim)
        step = self._cache.begin_step(lengths, longest)
        bias = step.bias.expand(-1, groups[1], -1)
        rotation = self._rotations[lengths].view(num, 1, 1, -1)
        hidden = functional.embedding(token_ids, weights.embedding)
        for number, layer in enumerate(weights.layers):
            queries_keys, values = self._layers.project(hidden, layer, rotation, (num, 1))
            queries = queries_keys[:, 0, : sizes.num_heads].reshape(groups)
            keys, values = self._cache.append(number, step, queries_keys[:, 0, sizes.num_heads :], values[:, 0])
            scores = torch.baddbmm(bias, queries, keys.transpose(1, 2), alpha=self._scale)
            mixed = torch.bmm(scores.softmax(dim=-1), values)
            self._layers.feed(hidden, mixed.view(num, -1), layer)
        return self._layers.logits(hidden, weights)

    def _project_whole(
        self, hidden: Tensor, layer: LayerWeights, batch: tuple[int, int], start: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Make rotated queries [N, H, T, D] and keys [N, Hkv, T, D], and values [N, Hkv, T, D], from a position on."""
        sizes = self._sizes
        rotation = self._rotations[start : start + batch[1]].view(1, batch[1], 1, -1)
        queries_keys, values = self._layers.project(hidden, layer, rotation, batch)
        queries, keys = queries_keys.transpose(1, 2).tensor_split((sizes.num_heads,), dim=1)
        return queries, keys, values.transpose(1, 2)
