"""A key/value cache for any attention model of transformers: rows of different lengths that end in the same column.

Columns are positions in the cache, aligned at their end: all rows append to the same column, as in a batch padded on
the left, which every such model supports by a two-dimensional attention mask. So rows may join and leave while the
distances between columns, which sliding windows count, stay right.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

FIRST_CAPACITY = 64


class _Columns(DynamicLayer):  # type: ignore[misc]
    """One layer's live columns, as transformers sees them while one token is appended."""

    def __init__(self, keys: Tensor, values: Tensor, first: int, end: int) -> None:
        super().__init__()
        self._buffers = (keys, values)
        self._first, self._end = first, end
        self.dtype, self.device = keys.dtype, keys.device
        self.keys, self.values = (buffer[:, :, first:end] for buffer in self._buffers)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        end = self._end + key_states.shape[-2]
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, self._end : end] = new
        self.keys, self.values = (buffer[:, :, self._first : end] for buffer in self._buffers)
        return self.keys, self.values


class ColumnCache:
    """Keys and values of every layer, each [rows, heads, capacity, dims]; shapes are learnt from the first prefill.

    Args:
        num_rows: rows.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._capacity = 0
        self._end = 0

    def write(self, computed: Cache, lengths: Sequence[int], rows: Sequence[Sequence[int]]) -> None:
        """Store sequences that were computed padded on the left.

        Args:
            computed: their cache, each layer [N, heads, T, dims].
            lengths: tokens of each.
            rows: the rows that get each.
        """
        if not self._layers:
            self._layers = [self._allocate(layer.keys, layer.values) for layer in computed.layers]
        longest = max(lengths)
        if longest > self._end:
            self._relocate(self._end, longest)
        for buffers, layer in zip(self._layers, computed.layers, strict=True):
            for buffer, new in zip(buffers, (layer.keys, layer.values), strict=True):
                for index, (length, targets) in enumerate(zip(lengths, rows, strict=True)):
                    # One row at a time: rows that continue keep what lies left of a shorter neighbour.
                    buffer[list(targets), :, self._end - length : self._end] = new[index, :, -length:]

    def appending(self, num_rows: int, longest: int) -> Cache:
        """Hand the first rows' live columns to a forward pass that appends one token to each."""
        if self._end + 1 > self._capacity:
            self._relocate(longest, longest)
        first = self._end - longest
        layers = [_Columns(keys[:num_rows], values[:num_rows], first, self._end) for keys, values in self._layers]
        self._end += 1
        return Cache(layers=layers)

    def release(self) -> None:
        """Free all rows."""
        self._layers, self._capacity, self._end = [], 0, 0

    def clear_rows(self, rows: Sequence[int]) -> None:
        """Zero rows."""
        for buffers in self._layers:
            for buffer in buffers:
                buffer[list(rows)] = 0

    def move_rows(self, sources: Sequence[int], targets: Sequence[int], longest: int) -> None:
        """Copy rows to other rows."""
        live = slice(max(self._end - longest, 0), self._end)
        for buffers in self._layers:
            for buffer in buffers:
                buffer[list(targets), :, live] = buffer[list(sources), :, live]

    def _allocate(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self._capacity = self._capacity or FIRST_CAPACITY

        def zeros(like: Tensor) -> Tensor:
            return torch.zeros(
                (self._num_rows, like.shape[1], self._capacity, like.shape[3]), dtype=like.dtype, device=like.device
            )

        return zeros(keys), zeros(values)

    def _relocate(self, num_live: int, end: int) -> None:
        """Move the last ``num_live`` columns so that they end at ``end``, with room for as many again."""
        old = slice(self._end - num_live, self._end)
        self._capacity = max(self._capacity, 2 * end)
        moved = []
        for keys, values in self._layers:
            new_keys, new_values = self._allocate(keys, values)
            new_keys[:, :, end - num_live : end] = keys[:, :, old]
            new_values[:, :, end - num_live : end] = values[:, :, old]
            moved.append((new_keys, new_values))
        self._layers, self._end = moved, end
