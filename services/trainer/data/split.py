"""Who computes which sequences: shares of about equal work."""

from collections.abc import Sequence

from services.trainer.algorithms.balancing import balanced_partition, workload
from services.trainer.data.packing import MicroLayout, Packing, lay_out


def split_layouts(
    lengths: Sequence[int], num_ranks: int, *, max_tokens: int, packing: Packing
) -> list[list[MicroLayout]]:
    """Cut sequences into the micro-batches of each rank.

    Args:
        lengths: tokens of each sequence, at least 1.
        num_ranks: that share the work.
        max_tokens: bound on the positions of one forward pass.
        packing: how rows are filled.

    Returns:
        Per rank its layouts, whose rows name positions in ``lengths``. Their numbers differ between ranks.
    """
    found = []
    for own in _shares(lengths, num_ranks):
        layouts = lay_out([lengths[number] for number in own], max_tokens=max_tokens, packing=packing)
        found.append([renumbered(layout, own) for layout in layouts])
    return found


def renumbered(layout: MicroLayout, numbers: Sequence[int]) -> MicroLayout:
    """Name the sequences of a layout by other numbers."""
    rows = tuple(tuple(numbers[position] for position in row) for row in layout.rows)
    return MicroLayout(rows, layout.width, layout.is_packed)


def _shares(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    if num_ranks == 1:
        return [list(range(len(lengths)))]
    if len(lengths) <= num_ranks:
        return [[number] if number < len(lengths) else [] for number in range(num_ranks)]
    return balanced_partition(workload(lengths), num_ranks)
