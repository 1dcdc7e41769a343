"""Partitions and micro-batches: complete, within budget, and close to the best there is."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla.services.trainer.algorithms.balancing import (
    balanced_partition,
    grouped_partition,
    largest_load,
    loads,
    rank_micro_batches,
    token_budget_micro_batches,
)

quick = settings(max_examples=40, deadline=None, derandomize=True)
sizes = st.lists(st.integers(0, 500), min_size=1, max_size=14)


@quick
@given(costs=sizes, count=st.integers(1, 6), equal=st.booleans())
def test_a_partition_has_every_item_once_and_no_empty_part(costs: list[int], count: int, equal: bool) -> None:
    if len(costs) < count:
        with pytest.raises(ValueError, match="empty"):
            balanced_partition(costs, count, equal_size=equal)
        return

    parts = balanced_partition(costs, count, equal_size=equal)

    assert sorted(item for part in parts for item in part) == list(range(len(costs)))
    assert min(map(len, parts)) >= 1
    if equal:
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@quick
@given(costs=st.lists(st.integers(1, 100), min_size=3, max_size=8), count=st.integers(2, 3))
def test_the_largest_part_is_near_the_optimum(costs: list[int], count: int) -> None:
    best = min(
        max(sum(cost for cost, part in zip(costs, choice, strict=True) if part == number) for number in range(count))
        for choice in product(range(count), repeat=len(costs))
    )

    assert largest_load(costs, balanced_partition(costs, count)) <= best * 1.17


@pytest.mark.parametrize(
    ("costs", "count", "equal", "upstream"),
    [
        ([10, 7, 6, 5, 4, 3, 2, 1], 2, True, 19),
        ([8, 7, 6, 5, 4], 2, False, 16),
        ([10, 7, 6, 5, 4, 3, 2, 1], 3, False, 13),
    ],
)
def test_no_worse_than_differencing_alone(costs: list[int], count: int, equal: bool, upstream: int) -> None:
    assert largest_load(costs, balanced_partition(costs, count, equal_size=equal)) <= upstream


@quick
@given(lengths=st.lists(st.integers(1, 100), min_size=1, max_size=20), slack=st.integers(0, 200))
def test_micro_batches_stay_within_the_budget(lengths: list[int], slack: int) -> None:
    budget = max(lengths) + slack

    parts = token_budget_micro_batches(lengths, budget)

    assert sorted(item for part in parts for item in part) == list(range(len(lengths)))
    assert max(loads(lengths, parts)) <= budget


def test_the_number_of_micro_batches_can_be_forced_up() -> None:
    assert len(token_budget_micro_batches([5] * 8, 40, min_count=3, multiple_of=2)) == 4


def test_a_sequence_beyond_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="raise the budget"):
        token_budget_micro_batches([5, 50], 40)


@quick
@given(lengths=st.lists(st.integers(1, 60), min_size=8, max_size=24), ranks=st.integers(1, 4))
def test_ranks_run_the_same_number_of_micro_batches(lengths: list[int], ranks: int) -> None:
    try:
        split = rank_micro_batches(lengths, ranks, 64)
    except ValueError:
        # A rank with as many sequences as micro-batches cannot follow one that needs more.
        return

    assert len({len(parts) for parts in split}) == 1
    assert sorted(item for parts in split for part in parts for item in part) == list(range(len(lengths)))


def test_groups_stay_together() -> None:
    parts = grouped_partition([5, 1, 9, 2, 3, 4], [0, 1, 0, 1, 2, 2], 2)

    assert sorted(map(tuple, parts)) == [(0, 2), (1, 3, 4, 5)]
