"""Every two values that may meet do, in few rows, and nothing that is excluded is in any."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pairs.covering import Case, covering_rows, is_excluded, wanted_pairs

VALUES = {name: [f"{name}{number}" for number in range(3)] for name in "abcdef"}
CASES = [(name, value) for name, values in VALUES.items() for value in values[1:]]


@given(excluded=st.sets(st.frozensets(st.sampled_from(CASES), min_size=2, max_size=3), max_size=12))
def test_every_allowed_pair_is_in_a_row_and_no_row_has_what_is_excluded(excluded: set[frozenset[Case]]) -> None:
    rows = covering_rows(VALUES, [list(VALUES)], excluded)

    met = {frozenset(pair) for row in rows for pair in combinations(row.items(), 2)}
    assert set(wanted_pairs(VALUES, [list(VALUES)], excluded)) <= met
    assert not any(is_excluded(row, excluded) for row in rows)
    assert all(row.keys() == VALUES.keys() for row in rows)


def test_rows_are_few() -> None:
    rows = covering_rows(VALUES, [list(VALUES)])

    assert 9 <= len(rows) <= 18, "729 combinations; nine is the least, for two options alone"


def test_options_that_share_nothing_need_not_meet() -> None:
    rows = covering_rows(VALUES, [["a", "b"], ["c", "d"]])

    met = {frozenset(pair) for row in rows for pair in combinations(row.items(), 2)}
    assert len(rows) <= 10
    assert set(wanted_pairs(VALUES, [["a", "b"], ["c", "d"]], ())) <= met


def test_the_same_table_gives_the_same_rows() -> None:
    assert covering_rows(VALUES, [list(VALUES)]) == covering_rows(VALUES, [list(VALUES)])


def test_a_first_value_that_is_excluded_is_an_error() -> None:
    with pytest.raises(ValueError, match="goes with all others"):
        covering_rows(VALUES, [list(VALUES)], [frozenset({("a", "a0"), ("b", "b1")})])
