"""Which waiting samples join the batch, and how their prompts are computed together; pure functions."""

from collections.abc import Sequence


def group_sizes(waiting: Sequence[int], free: int, slots: int) -> list[int]:
    """Decide how many samples of each waiting request join now, first come first served.

    A request joins whole, so that its prompt is computed once; one that is larger than the batch joins in parts.
    No request overtakes another, so none starves.

    Args:
        waiting: samples of each waiting request, oldest first.
        free: rows that are free.
        slots: all rows.

    Returns:
        How many samples join, for the first requests of ``waiting``.
    """
    joining: list[int] = []
    for num in waiting:
        if num > free and not (num > slots and free):
            break
        joining.append(min(num, free))
        free -= joining[-1]
    return joining


def prefill_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Group sequences of similar lengths, to be computed together with little padding.

    Args:
        lengths: tokens of each sequence.
        budget: tokens of one batch, padding included; a longer sequence is a batch of its own.

    Returns:
        Batches of indices into ``lengths``, longest sequences first.
    """
    batches: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = batches and (len(batches[-1]) + 1) * longest <= budget
        # Padding of a quarter costs less than another pass over the layers; 16 tokens always do.
        if fits and lengths[index] >= longest * 3 // 4 - 16:
            batches[-1].append(index)
        else:
            batches.append([index])
            longest = lengths[index]
    return batches
