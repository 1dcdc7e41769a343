"""Load balancing: sequences over ranks, and over micro-batches under a token budget, so that no rank waits long.

Finding the best split is NP-hard. Two constructions (Karmarkar-Karp differencing and longest-first) are improved by
moving and swapping sequences out of the largest part, and the better result is taken; small cases get a few restarts
from a disturbed solution. The same input always gives the same split.
"""

import heapq
import math
import random
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Partition = list[list[int]]
LINEAR_COST = 24_576
"""Tokens at which attention's quadratic work equals the linear layers', for a model of 7 billion parameters."""
MAX_IMPROVEMENTS = 2_000
RESTARTS, LARGE, GOOD_ENOUGH = 24, 256, 1.0001
"""Restarts from a disturbed solution, for up to this many items, while the largest part is this far above the bound."""


def workload(lengths: Sequence[int], *, linear: float = LINEAR_COST) -> list[float]:
    """Estimate the work of sequences, ``linear * length + length^2``, in arbitrary units.

    Source: verl, seqlen_balancing (calculate_workload).
    """
    return [linear * length + length**2 for length in lengths]


def balanced_partition(costs: Sequence[float], count: int, *, equal_size: bool = False) -> Partition:
    """Split items into ``count`` parts whose largest sum is small.

    Args:
        costs: [N], not negative.
        count: parts; none is empty.
        equal_size: whether the parts' sizes may differ by one at most.

    Returns:
        Indices per part, each ascending.

    Raises:
        ValueError: fewer items than parts.
    """
    if count < 1 or len(costs) < count:
        raise ValueError(f"cannot split {len(costs)} sequences into {count} parts without an empty one")
    values = np.asarray(costs, dtype=np.float64)
    constructed = [_karmarkar_karp(costs, count, equal_size), _longest_first(costs, count, equal_size)]
    improved = [_improve(values, _without_empty(costs, parts), equal_size) for parts in constructed]
    best = min(improved, key=lambda parts: largest_load(costs, parts))
    goal, shuffled = max(values.sum() / count, values.max()) * GOOD_ENOUGH, random.Random(0)
    for _ in range(RESTARTS if len(costs) <= LARGE else 0):
        if largest_load(costs, best) <= goal:
            break
        other = _improve(values, _disturbed(best, shuffled), equal_size)
        best = min(best, other, key=lambda parts: largest_load(costs, parts))
    return [sorted(part) for part in best]


def grouped_partition(costs: Sequence[float], group_index: Sequence[int], count: int) -> Partition:
    """Split as ``balanced_partition``, with all members of a group in one part (a shared prompt is computed once)."""
    members: dict[int, list[int]] = defaultdict(list)
    for item, group in enumerate(group_index):
        members[group].append(item)
    groups = list(members.values())
    parts = balanced_partition([sum(costs[item] for item in group) for group in groups], count)
    return [sorted(item for position in part for item in groups[position]) for part in parts]


def token_budget_micro_batches(
    lengths: Sequence[int], max_tokens: int, *, min_count: int = 1, multiple_of: int = 1
) -> Partition:
    """Pack sequences into as few micro-batches as the budget allows, of about equal length.

    Args:
        lengths: [N] tokens.
        max_tokens: most tokens in a micro-batch.
        min_count: least number of micro-batches (what another rank needs, so that collectives match).
        multiple_of: their number is a multiple of this.

    Returns:
        Indices per micro-batch, each ascending; no micro-batch is empty.

    Raises:
        ValueError: a sequence exceeds the budget, or there are fewer sequences than micro-batches wanted.
    """
    if not lengths:
        return []
    if max(lengths) > max_tokens:
        raise ValueError(f"a sequence of {max(lengths)} tokens exceeds the budget of {max_tokens}: raise the budget")
    fewest = max(math.ceil(sum(lengths) / max_tokens), min_count)
    work = workload(lengths)
    for count in range(math.ceil(fewest / multiple_of) * multiple_of, len(lengths) + 1, multiple_of):
        fitting = [
            parts
            for parts in (
                balanced_partition(work, count),
                balanced_partition(lengths, count),
                _best_fit(lengths, count, max_tokens),
            )
            if parts is not None and largest_load(lengths, parts) <= max_tokens
        ]
        if fitting:
            return min(fitting, key=lambda parts: largest_load(lengths, parts))
    raise ValueError(
        f"{len(lengths)} sequences cannot make a multiple of {multiple_of} micro-batches, {fewest} at least"
    )


def rank_micro_batches(lengths: Sequence[int], num_ranks: int, max_tokens: int) -> list[Partition]:
    """Split a mini-batch over ranks, then into micro-batches; every rank gets the same number of them.

    Args:
        lengths: [N] tokens, N at least the number of ranks.
        num_ranks: data-parallel ranks.
        max_tokens: most tokens in a micro-batch.

    Returns:
        Per rank, per micro-batch, the indices into ``lengths``.

    Raises:
        ValueError: a sequence exceeds the budget, or a rank has fewer sequences than another needs micro-batches.
    """
    ranks = balanced_partition(workload(lengths), num_ranks, equal_size=True)
    own = [[lengths[item] for item in rank] for rank in ranks]
    parts = [token_budget_micro_batches(rank, max_tokens) for rank in own]
    while len({len(split) for split in parts}) > 1:
        count = max(len(split) for split in parts)
        parts = [token_budget_micro_batches(rank, max_tokens, min_count=count) for rank in own]
    return [[[rank[item] for item in part] for part in split] for rank, split in zip(ranks, parts, strict=True)]


def loads(costs: Sequence[float], parts: Partition) -> list[float]:
    """Sum the costs of each part."""
    return [sum(costs[item] for item in part) for part in parts]


def largest_load(costs: Sequence[float], parts: Partition) -> float:
    """Find the largest sum: what everybody waits for."""
    return max(loads(costs, parts))


def _karmarkar_karp(costs: Sequence[float], count: int, equal_size: bool) -> Partition:
    """Difference the states of largest spread until one is left.

    Source: Karmarkar and Karp, The Differencing Method of Set Partitioning, 1982.
    """
    order = sorted(range(len(costs)), key=lambda item: costs[item])
    if equal_size:
        # Dummy items of cost 0 fill the last state up.
        padded = [-1] * (-len(order) % count) + order
        starts = [[[item] if item >= 0 else [] for item in padded[i : i + count]] for i in range(0, len(padded), count)]
    else:
        starts = [[[] for _ in range(count - 1)] + [[item]] for item in order]
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for ticket, start in enumerate(starts):
        state = sorted(((sum(costs[item] for item in part), part) for part in start), key=lambda pair: pair[0])
        heapq.heappush(heap, (state[0][0] - state[-1][0], ticket, state))
    ticket = len(starts)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        joined = sorted(
            ((a[0] + b[0], a[1] + b[1]) for a, b in zip(first, reversed(second), strict=True)), key=lambda pair: pair[0]
        )
        heapq.heappush(heap, (joined[0][0] - joined[-1][0], ticket, joined))
        ticket += 1
    return [part for _, part in heap[0][2]]


def _longest_first(costs: Sequence[float], count: int, equal_size: bool) -> Partition:
    largest_size = math.ceil(len(costs) / count) if equal_size else len(costs)
    num_large = len(costs) - (largest_size - 1) * count if equal_size else count
    parts: Partition = [[] for _ in range(count)]
    heap = [(0.0, number) for number in range(count)]
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        load, number = heapq.heappop(heap)
        parts[number].append(item)
        if equal_size and len(parts[number]) == largest_size:
            num_large -= 1
            if num_large == 0 and len(costs) % count:
                heap = [entry for entry in heap if len(parts[entry[1]]) < largest_size - 1]
                heapq.heapify(heap)
                largest_size -= 1
            continue
        if not equal_size or len(parts[number]) < largest_size:
            heapq.heappush(heap, (load + costs[item], number))
    return parts


def _best_fit(lengths: Sequence[int], count: int, capacity: int) -> Partition | None:
    """Put each sequence, longest first, where it leaves the least room; None if it fits nowhere."""
    parts: Partition = [[] for _ in range(count)]
    room = [capacity] * count
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        fitting = [number for number in range(count) if room[number] >= lengths[item]]
        if not fitting:
            return None
        best = min(fitting, key=lambda number: room[number])
        parts[best].append(item)
        room[best] -= lengths[item]
    return _without_empty(lengths, parts)


def _without_empty(costs: Sequence[float], parts: Partition) -> Partition:
    """Give every empty part the cheapest sequence of the part with most of them."""
    parts = [list(part) for part in parts]
    for part in parts:
        if not part:
            donor = max(parts, key=len)
            cheapest = min(donor, key=lambda item: costs[item])
            donor.remove(cheapest)
            part.append(cheapest)
    return parts


def _disturbed(parts: Partition, shuffled: random.Random) -> Partition:
    """Swap a few random pairs between parts; sizes stay."""
    parts = [list(part) for part in parts]
    for _ in range(len(parts) if len(parts) > 1 else 0):
        first, second = shuffled.sample(range(len(parts)), 2)
        a, b = shuffled.randrange(len(parts[first])), shuffled.randrange(len(parts[second]))
        parts[first][a], parts[second][b] = parts[second][b], parts[first][a]
    return parts


def _improve(costs: NDArray[np.float64], parts: Partition, equal_size: bool) -> Partition:
    """Move or swap sequences out of the largest part while that lowers the larger of the two loads concerned."""
    sums = np.array([costs[part].sum() for part in parts])
    for _ in range(MAX_IMPROVEMENTS):
        largest = int(sums.argmax())
        best = _best_exchange(costs, parts, sums, largest, equal_size)
        if best is None:
            return parts
        other, given, taken = best
        change = costs[given] - (0.0 if taken is None else costs[taken])
        parts[largest].remove(given)
        parts[other].append(given)
        if taken is not None:
            parts[other].remove(taken)
            parts[largest].append(taken)
        sums[largest] -= change
        sums[other] += change
    return parts


def _best_exchange(
    costs: NDArray[np.float64], parts: Partition, sums: NDArray[np.float64], largest: int, equal_size: bool
) -> tuple[int, int, int | None] | None:
    """Find the exchange that leaves the smallest maximum: (other part, item given, item taken back or None)."""
    best, lowest = None, sums[largest] * (1 - 1e-12)
    given = np.array(parts[largest])
    for other, part in enumerate(parts):
        if other == largest:
            continue
        taken = np.array([*part, -1] if not equal_size and len(given) > 1 else part)
        if not taken.size:
            continue
        change = costs[given][:, None] - np.where(taken >= 0, costs[taken], 0.0)[None, :]
        result = np.where(change > 0, np.maximum(sums[largest] - change, sums[other] + change), np.inf)
        row, column = np.unravel_index(int(result.argmin()), result.shape)
        if result[row, column] < lowest:
            lowest = result[row, column]
            chosen = int(taken[column])
            best = (other, int(given[row]), chosen if chosen >= 0 else None)
    return best
