"""Which samples join, and how prompts are computed together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flotilla.services.rollout.engines.admission import group_sizes, prefill_batches


@pytest.mark.parametrize(
    ("waiting", "free", "joining"),
    [
        ([3, 2], 8, [3, 2]),
        ([3, 6, 1], 8, [3]),  # the third does not overtake the second
        ([6], 5, []),  # a group that fits the batch joins whole
        ([20], 5, [5]),  # one that does not, in parts
        ([20], 0, []),
        ([], 5, []),
    ],
)
def test_groups_join_whole_and_in_order(waiting: list[int], free: int, joining: list[int]) -> None:
    assert group_sizes(waiting, free, slots=8) == joining


@given(st.lists(st.integers(1, 30), max_size=20), st.integers(0, 16))
def test_no_more_join_than_fit(waiting: list[int], free: int) -> None:
    joining = group_sizes(waiting, free, slots=16)

    assert sum(joining) <= free
    assert all(0 < size <= wanted for size, wanted in zip(joining, waiting, strict=False))


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.integers(1, 600))
def test_every_sequence_is_computed_once_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = prefill_batches(lengths, budget)

    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        longest, shortest = max(lengths[i] for i in batch), min(lengths[i] for i in batch)
        assert len(batch) == 1 or len(batch) * longest <= budget
        assert shortest >= longest * 3 // 4 - 16


def test_equal_prompts_share_a_batch() -> None:
    assert prefill_batches([30, 33, 31, 300], budget=1000) == [[3], [1, 2, 0]]
