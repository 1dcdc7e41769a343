from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flotilla.shared.streams.intervals import IntervalSet

small = st.integers(0, 60)


@given(st.lists(small), st.lists(small))
def test_it_is_a_set(first: list[int], second: list[int]) -> None:
    made = IntervalSet(first)
    for value in second:
        made.add(value)

    truth = set(first) | set(second)
    assert list(made) == sorted(truth)
    assert len(made) == len(truth)
    assert [value in made for value in range(-1, 62)] == [value in truth for value in range(-1, 62)]
    assert made == IntervalSet(truth) == IntervalSet.from_list(made.to_list())


@given(st.lists(small))
def test_intervals_are_sorted_disjoint_and_never_touch(values: list[int]) -> None:
    intervals = IntervalSet(values).to_list()

    assert all(start <= end for start, end in intervals)
    assert all(before[1] + 1 < after[0] for before, after in pairwise(intervals))


@given(st.lists(small), st.lists(small))
def test_a_union_holds_what_either_holds_and_changes_neither(first: list[int], second: list[int]) -> None:
    one, other = IntervalSet(first), IntervalSet(second)

    assert list(one.union(other)) == sorted({*first, *second})
    assert one.union(one.union(other)) == one.union(other).union(one) == other.union(one)
    assert (list(one), list(other)) == (sorted(set(first)), sorted(set(second)))


@given(st.lists(st.tuples(small, st.integers(0, 9))))
def test_any_list_of_intervals_can_be_read(pairs: list[tuple[int, int]]) -> None:
    made = IntervalSet.from_list([(start, start + length) for start, length in pairs])

    assert set(made) == {value for start, length in pairs for value in range(start, start + length + 1)}


def test_dense_ids_are_one_interval() -> None:
    made = IntervalSet(range(100_000))

    assert made.to_list() == [[0, 99_999]]
    assert repr(made) == "IntervalSet.from_list([[0, 99999]])"
    assert made != IntervalSet()


def test_an_interval_that_ends_before_it_starts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[3, 2\]"):
        IntervalSet.from_list([[3, 2]])


@given(st.lists(small), small)
def test_a_copy_is_a_set_of_its_own(values: list[int], value: int) -> None:
    made = IntervalSet(values)
    copied = made.copy()
    copied.add(value)

    assert (list(made), list(copied)) == (sorted(set(values)), sorted({*values, value}))


@given(st.lists(small), st.lists(small))
def test_a_set_that_grew_at_its_end_is_the_union_with_what_it_was(first: list[int], second: list[int]) -> None:
    was = IntervalSet(first)
    grew = was.copy()
    grew.add_many(max(first, default=0) + each for each in second)

    assert was.union(grew) == grew.union(was) == grew


@given(st.sets(st.integers(0, 60)), st.integers(0, 60), st.integers(0, 60))
def test_what_lies_between_ended_intervals_is_closed_and_counted(values: set[int], bound: int, more: int) -> None:
    made, whole = IntervalSet(values), IntervalSet(values)

    added = made.close_below(bound)

    ended = [(first, last) for first, last in whole.to_list() if last < bound]
    closed = set(range(ended[0][0], ended[-1][1] + 1)) if ended else set()
    assert set(made) == values | closed
    assert added == len(closed - values)
    assert sum(last < bound for _, last in made.to_list()) <= 1
    assert made.close_below(bound) == 0
    made.add(more)
    assert set(made) == values | closed | {more}
    assert made == IntervalSet(made)
