"""From sequences to micro-batches: how many tokens are computed, and in which rows.

*padded*: one sequence per row, rows of a micro-batch as wide as its longest sequence; sequences are sorted by length
and cut where that saves the most padding. *packed*: several sequences per row, rows as wide as the longest sequence;
attention stays within a sequence. A row is never made longer than that: a dense attention mask pays for its zeros.

The gradient does not depend on any of this, since losses are divided by denominators of the whole mini-batch.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Packing = Literal["auto", "packed", "padded"]

PACKED_POSITION_COST = 1.25
"""Cost of a position in a packed row relative to a padded one: its attention reads a dense mask (measured on a CPU)."""
MICRO_BATCH_COST_TOKENS = 384
"""Fixed cost of one more forward and backward pass, in token positions (small models on one CPU core)."""


@dataclass(frozen=True)
class MicroLayout:
    """Which sequences stand in which row of one forward pass.

    Attributes:
        rows: per row, the numbers of its sequences from left to right.
        width: positions of a row.
        is_packed: whether rows may hold several sequences.
    """

    rows: tuple[tuple[int, ...], ...]
    width: int
    is_packed: bool

    @property
    def positions(self) -> int:
        """Token positions that are computed, padding included."""
        return len(self.rows) * self.width

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of the sequences, row by row."""
        return tuple(number for row in self.rows for number in row)


def lay_out(lengths: Sequence[int], *, max_tokens: int, packing: Packing) -> tuple[MicroLayout, ...]:
    """Cut sequences into micro-batches of at most ``max_tokens`` positions; a longer sequence makes one of its own.

    Args:
        lengths: tokens of each sequence, at least 1.
        max_tokens: bound on rows times width.
        packing: ``auto`` takes whichever costs less.
    """
    if not lengths:
        return ()
    if packing == "padded":
        return _padded(lengths, max_tokens)
    packed = _packed(lengths, max_tokens)
    if packing == "packed":
        return packed
    padded = _padded(lengths, max_tokens)
    return packed if _cost(packed) < _cost(padded) else padded


def _cost(layouts: Sequence[MicroLayout]) -> float:
    positions = sum(each.positions * (PACKED_POSITION_COST if each.is_packed else 1.0) for each in layouts)
    return positions + MICRO_BATCH_COST_TOKENS * len(layouts)


def _padded(lengths: Sequence[int], max_tokens: int) -> tuple[MicroLayout, ...]:
    order = sorted(range(len(lengths)), key=lambda number: (-lengths[number], number))
    cuts = _best_cuts(np.array([lengths[number] for number in order], dtype=np.int64), max_tokens)
    return tuple(
        MicroLayout(tuple((number,) for number in order[start:end]), lengths[order[start]], is_packed=False)
        for start, end in cuts
    )


def _best_cuts(lengths: npt.NDArray[np.int64], max_tokens: int) -> list[tuple[int, int]]:
    """Cut falling lengths into runs of least total cost: dynamic programming over where the last run starts."""
    count = len(lengths)
    best = np.zeros(count + 1)
    start_of = np.zeros(count + 1, dtype=np.int64)
    for end in range(1, count + 1):
        starts = np.arange(end)
        positions = (end - starts) * lengths[:end]
        cost = best[:end] + positions + MICRO_BATCH_COST_TOKENS
        cost[(positions > max_tokens) & (starts < end - 1)] = np.inf
        start_of[end] = int(cost.argmin())
        best[end] = cost[start_of[end]]
    cuts = []
    end = count
    while end:
        cuts.append((int(start_of[end]), end))
        end = int(start_of[end])
    return cuts[::-1]


def _packed(lengths: Sequence[int], max_tokens: int) -> tuple[MicroLayout, ...]:
    width = max(lengths)
    rows = _fill_rows(lengths, width)
    per_batch = max(1, max_tokens // width)
    layouts = []
    for start in range(0, len(rows), per_batch):
        part = rows[start : start + per_batch]
        layouts.append(
            MicroLayout(tuple(part), max(sum(lengths[number] for number in row) for row in part), is_packed=True)
        )
    return tuple(layouts)


def _fill_rows(lengths: Sequence[int], width: int) -> list[tuple[int, ...]]:
    """Pack by best fit, longest first (Johnson, Fast Algorithms for Bin Packing, 1974)."""
    rows: list[list[int]] = []
    spare: list[tuple[int, int]] = []  # sorted (free positions, row)
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        at = bisect_left(spare, (lengths[number], -1))
        if at < len(spare):
            free, row = spare.pop(at)
        else:
            free, row = width, len(rows)
            rows.append([])
        rows[row].append(number)
        insort(spare, (free - lengths[number], row))
    return [tuple(row) for row in rows]


@dataclass(frozen=True, eq=False)
class ModelInput:
    """What one forward pass reads, and where its predictions stand.

    Attributes:
        token_ids: [rows, width] int64, padded on the right with 0.
        position_ids: [rows, width] int64, from 0 in every sequence.
        attention_mask: [rows, 1, width, width] bool, True where attention is allowed; None for plain causal attention,
            which padding on the right does not disturb.
        predictors: [N] int64, flat positions whose hidden states predict the labels.
        labels: [N] int64, sampled tokens.
    """

    token_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None
    predictors: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> "ModelInput":
        """Move the tensors."""
        mask = None if self.attention_mask is None else self.attention_mask.to(device)
        return ModelInput(
            self.token_ids.to(device),
            self.position_ids.to(device),
            mask,
            self.predictors.to(device),
            self.labels.to(device),
        )


def build_input(
    layout: MicroLayout, token_ids: Sequence[npt.NDArray[np.int64]], sampled: Mapping[int, npt.NDArray[np.int64]]
) -> ModelInput:
    """Fill the rows of a layout.

    Args:
        layout: of a micro-batch.
        token_ids: per sequence of the whole batch, [L] tokens.
        sampled: by number of the sequence, positions of the tokens that the policy sampled, each at least 1.

    Returns:
        The input; predictors and labels run over the layout's members in order.
    """
    shape = (len(layout.rows), layout.width)
    ids, positions = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    owner = np.full(shape, -1, dtype=np.int64)
    predictors, labels = [], []
    for row, members in enumerate(layout.rows):
        start = 0
        for number in members:
            tokens, chosen = token_ids[number], sampled[number]
            end = start + len(tokens)
            ids[row, start:end] = tokens
            positions[row, start:end] = np.arange(len(tokens))
            owner[row, start:end] = number
            predictors.append(row * layout.width + start + chosen - 1)
            labels.append(tokens[chosen])
            start = end
    return ModelInput(
        token_ids=torch.from_numpy(ids),
        position_ids=torch.from_numpy(positions),
        attention_mask=_block_causal(torch.from_numpy(owner)) if layout.is_packed else None,
        predictors=torch.from_numpy(np.concatenate(predictors)),
        labels=torch.from_numpy(np.concatenate(labels)),
    )


def _block_causal(owner: Tensor) -> Tensor:
    """Allow attention to earlier positions of the same sequence; [rows, W] owners to [rows, 1, W, W]."""
    # Padding has an owner of its own (-1), so that no row of the mask is empty: its softmax would be NaN.
    same = owner.unsqueeze(2) == owner.unsqueeze(1)
    causal = torch.ones(owner.shape[1], owner.shape[1], dtype=torch.bool).tril()
    return (same & causal).unsqueeze(1)
