"""Who computes which sequences: shares of about equal work."""

from collections.abc import Sequence

from flotilla.services.trainer.algorithms.balancing import balanced_partition, workload
from flotilla.services.trainer.data.packing import SMALL_HIDDEN_SIZE, MicroLayout, Packing, Prompt, lay_out


def split_layouts(
    lengths: Sequence[int],
    num_ranks: int,
    *,
    max_tokens: int,
    packing: Packing,
    prompts: Sequence[Prompt] | None = None,
    hidden_size: int = SMALL_HIDDEN_SIZE,
    attends_apart: bool = False,
) -> list[list[MicroLayout]]:
    """Cut sequences into the micro-batches of each rank.

    Args:
        lengths: tokens of each sequence, at least 1.
        num_ranks: that share the work.
        max_tokens: bound on the positions of one forward pass.
        packing: how rows are filled.
        prompts: how each begins; None where no prompt may be shared.
        hidden_size: of the model.
        attends_apart: whether attention goes sequence by sequence in packed rows.

    Returns:
        Per rank its layouts, whose rows name positions in ``lengths``. Their numbers differ between ranks.
    """
    found = []
    for own in _shares(lengths, num_ranks):
        layouts = lay_out(
            [lengths[number] for number in own],
            max_tokens=max_tokens,
            packing=packing,
            prompts=None if prompts is None else [prompts[number] for number in own],
            hidden_size=hidden_size,
            attends_apart=attends_apart,
        )
        found.append([renumbered(layout, own) for layout in layouts])
    return found


def renumbered(layout: MicroLayout, numbers: Sequence[int]) -> MicroLayout:
    """Name the sequences of a layout by other numbers."""
    rows = tuple(tuple(numbers[position] for position in row) for row in layout.rows)
    shared = {numbers[position]: tokens for position, tokens in layout.shared.items()}
    return MicroLayout(rows, layout.width, layout.is_packed, shared)


def _shares(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    if num_ranks == 1:
        return [list(range(len(lengths)))]
    if len(lengths) <= num_ranks:
        return [[number] if number < len(lengths) else [] for number in range(num_ranks)]
    return balanced_partition(workload(lengths), num_ranks)
