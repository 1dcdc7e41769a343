"""Where the tokens of each sequence are in packed rows, so that attention can go sequence by sequence."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

LEAST_FILLED = 0.75
"""Sequences are attended to together while the shortest has this share of the longest one's length."""


@dataclass(frozen=True, eq=False)
class SequencePlaces:
    """Positions are flat, row times width plus column: P of them. Slots are those of all blocks in turn: G of them.

    Attributes:
        blocks: sequences and slots of each, of every block.
        position_of: [G] int64, the position that a slot holds; -1 for padding.
        slots, starts: [<=G] and [P + 1] int64, the slots that hold position p: ``slots[starts[p] : starts[p + 1]]``.
        slot_of: [P] int64, the slot in which a position's own result is; -1 for padding.
        result_of: [G] int64, the position whose result a slot has; -1 for padding, and where another slot has it.
        row_starts: [N + 1] int32, where each sequence's slots begin, padding included, and where the last one's end.
    """

    blocks: tuple[tuple[int, int], ...]
    position_of: Tensor
    slots: Tensor
    starts: Tensor
    slot_of: Tensor
    result_of: Tensor
    row_starts: Tensor

    def to(self, device: torch.device) -> "SequencePlaces":
        """Move what gathering by a GPU needs there; kernels of the CPU take the rest."""
        if device.type == "cpu":
            return self
        names = ("position_of", "slot_of", "row_starts")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def places_of(sequences: Sequence[npt.NDArray[np.int64]], num_positions: int) -> SequencePlaces:
    """Put sequences into blocks.

    Args:
        sequences: the positions of each, in order. Where several begin with the same positions, these have one result.
        num_positions: P.
    """
    by_length = sorted(range(len(sequences)), key=lambda number: -len(sequences[number]))
    blocks: list[list[int]] = []
    for number in by_length:
        if not blocks or len(sequences[number]) < LEAST_FILLED * len(sequences[blocks[-1][0]]):
            blocks.append([])
        blocks[-1].append(number)
    filled = [np.full((len(block), len(sequences[block[0]])), -1, dtype=np.int64) for block in blocks]
    for block, slots in zip(blocks, filled, strict=True):
        for row, number in enumerate(block):
            slots[row, : len(sequences[number])] = sequences[number]
    position_of = np.concatenate([slots.reshape(-1) for slots in filled])
    used = np.flatnonzero(position_of >= 0)
    order = used[np.argsort(position_of[used], kind="stable")]
    counts = np.bincount(position_of[used], minlength=num_positions)
    starts = np.concatenate([[0], np.cumsum(counts)])
    slot_of = np.full(num_positions, -1, dtype=np.int64)
    present = counts > 0
    slot_of[present] = order[starts[:-1][present]]
    result_of = np.full(len(position_of), -1, dtype=np.int64)
    result_of[slot_of[present]] = np.flatnonzero(present)
    shapes = tuple((int(slots.shape[0]), int(slots.shape[1])) for slots in filled)
    widths = np.repeat([width for _, width in shapes], [count for count, _ in shapes])
    row_starts = np.concatenate([[0], np.cumsum(widths)]).astype(np.int32)
    arrays = (position_of, order, starts, slot_of, result_of, row_starts)
    return SequencePlaces(shapes, *(torch.from_numpy(np.ascontiguousarray(each)) for each in arrays))
