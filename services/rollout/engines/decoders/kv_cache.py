"""The key/value cache of the fused forward: rows that grow together, stored per key/value head.

Capacity in tokens follows the longest live row, so memory is that of what is in use and the rows lie close together.
What is copied between rows is whole blocks of ``SPAN_STEP`` tokens, in which the native kernels keep keys dims first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flotilla.services.rollout.engines.decoders.architecture import Architecture
from flotilla.services.rollout.engines.decoders.base import KeptRow
from flotilla.services.rollout.engines.decoders.native.kernels import Kernels

SPAN_STEP = 16
FIRST_CAPACITY = 64


def whole_blocks(num_tokens: int) -> int:
    """Round up to whole blocks."""
    return -(-num_tokens // SPAN_STEP) * SPAN_STEP


@dataclass(frozen=True, slots=True)
class Step:
    """What all layers share in one decode step.

    Attributes:
        num_rows: B.
        span: tokens that attention covers, at least the longest row with its new token.
        bias: [B * Hkv, 1, span], 0 for live positions and -inf for the others.
        places: [B * Hkv] int64, where the new keys and values go in the flat cache.
    """

    num_rows: int
    span: int
    bias: Tensor
    places: Tensor


class KeyValueCache:
    """Keys and values of every layer, each [rows, Hkv, capacity, D].

    Args:
        architecture: the sizes.
        num_rows: rows.
        context_tokens: the largest capacity.
        dtype, device: of the cache.
        kernels: the native kernels, if they are to copy rows.
    """

    def __init__(
        self,
        architecture: Architecture,
        num_rows: int,
        context_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels | None = None,
    ) -> None:
        self._num_rows = num_rows
        self._num_heads = architecture.num_kv_heads
        self._head_dim = architecture.head_dim
        self._largest = whole_blocks(context_tokens)
        self._dtype = dtype
        self._device = device
        self._kernels = kernels
        self.generation = 0
        """Changes when the tensors are others."""
        self._capacity = min(FIRST_CAPACITY, self._largest)
        self._keys = [self._allocate() for _ in range(architecture.num_layers)]
        self._values = [self._allocate() for _ in range(architecture.num_layers)]
        self._ramp, self._head_starts = self._tables()

    def _allocate(self) -> Tensor:
        # Zeros: a masked position has no effect only if it is finite.
        shape = (self._num_rows, self._num_heads, self._capacity, self._head_dim)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def _tables(self) -> tuple[Tensor, Tensor]:
        """Make what every step reads: zeros followed by as many -inf, and where each head of each row starts."""
        self.generation += 1
        ramp = torch.zeros(2 * self._capacity, dtype=self._dtype, device=self._device)
        ramp[self._capacity :] = float("-inf")
        return ramp, torch.arange(self._num_rows * self._num_heads, device=self._device) * self._capacity

    def reserve(self, num_tokens: int) -> None:
        """Grow the capacity to at least ``num_tokens``."""
        if num_tokens <= self._capacity:
            return
        old = self._capacity
        wanted = max(num_tokens, old + old // 2)
        self._capacity = min(whole_blocks(wanted), self._largest)
        self._ramp, self._head_starts = self._tables()
        for caches in (self._keys, self._values):
            for number, cache in enumerate(caches):
                caches[number] = self._allocate()
                caches[number][:, :, :old] = cache

    def release(self) -> None:
        """Free all rows; the capacity grows again from what the next ones need."""
        self._capacity = 0
        for caches in (self._keys, self._values):
            caches[:] = [self._allocate() for _ in caches]
        self._ramp, self._head_starts = self._tables()

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Give all keys and values of a layer: [rows, Hkv, capacity, D] each, until the capacity grows."""
        return self._keys[number], self._values[number]

    def begin_step(self, lengths: Tensor, longest: int) -> Step:
        """Prepare a decode step of rows that hold ``lengths`` tokens."""
        self.reserve(longest + 1)
        num = lengths.shape[0]
        span = min(whole_blocks(longest + 1), self._capacity)
        per_head = lengths.repeat_interleave(self._num_heads)
        # A row of n tokens sees its new one too: its bias begins n + 1 zeros before the -inf half of the ramp.
        bias = self._ramp.unfold(0, span, 1).index_select(0, self._capacity - 1 - per_head)
        places = self._head_starts[: num * self._num_heads] + per_head
        return Step(num, span, bias.unsqueeze(1), places)

    def append(self, layer: int, step: Step, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new keys and values [B, Hkv, D], and give all of the rows: [B * Hkv, span, D] each."""
        written = []
        for cache, new in ((self._keys[layer], keys), (self._values[layer], values)):
            cache.view(-1, self._head_dim).index_copy_(0, step.places, new.reshape(-1, self._head_dim))
            rows = cache.view(-1, self._capacity, self._head_dim)
            written.append(rows[: step.num_rows * self._num_heads, : step.span])
        return written[0], written[1]

    def write_prefix(self, layer: int, rows: Tensor, origins: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write the first tokens of rows.

        Args:
            layer: its number.
            rows: [R] int64.
            origins: [R] int64, which of the N prefixes each row gets.
            keys, values: [N, Hkv, T, D].
        """
        length = keys.shape[2]
        for cache, new in ((self._keys[layer], keys), (self._values[layer], values)):
            cache[:, :, :length].index_copy_(0, rows, new[origins])

    def row_bytes(self, num_tokens: int) -> int:
        """Count the bytes of the first tokens of a row, in whole blocks."""
        of_a_token = 2 * len(self._keys) * self._num_heads * self._head_dim * self._dtype.itemsize
        return whole_blocks(num_tokens) * of_a_token

    def keep(self, row: int, num_tokens: int) -> KeptRow:
        """Copy the first tokens of a row."""
        whole = whole_blocks(num_tokens)
        keys, values = (torch.stack([each[row, :, :whole] for each in caches]) for caches in (self._keys, self._values))
        return KeptRow(keys, values)

    def put(self, row: int, kept: KeptRow, num_tokens: int) -> None:
        """Write the first tokens of what was kept to a row, which has room for them."""
        whole = whole_blocks(num_tokens)
        for caches, layers in ((self._keys, kept.keys), (self._values, kept.values)):
            for cache, layer in zip(caches, layers, strict=True):
                cache[row, :, :whole] = layer[:, :whole]

    def clear_rows(self, rows: Sequence[int]) -> None:
        """Zero rows."""
        for cache in (*self._keys, *self._values):
            cache[list(rows)] = 0

    def move_rows(self, sources: Sequence[int], targets: Sequence[int], longest: int) -> None:
        """Copy the first ``longest`` tokens of rows to other rows."""
        whole = whole_blocks(longest)
        source = torch.tensor(sources, device=self._device)
        target = torch.tensor(targets, device=self._device)
        for cache in (*self._keys, *self._values):
            if self._kernels is not None:
                self._kernels.copy_rows(cache, source, target, whole)
            else:
                live = cache[:, :, :whole]
                live.index_copy_(0, target, live[source])
