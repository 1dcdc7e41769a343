"""Which pages rows hold, with pages of four tokens."""

import numpy as np
import pytest

from flotilla.services.rollout.engines.decoders.paged import PageTable


@pytest.fixture
def table() -> PageTable:
    made = PageTable(num_rows=4, row_pages=5, page_tokens=4)
    made.grow(12)
    return made


def pages(table: PageTable, row: int) -> list[int]:
    return [int(page) for page in table.table[row] if page]


def test_rows_of_one_prompt_share_the_pages_that_it_fills(table: PageTable) -> None:
    copies = table.start([0, 2], 6)

    first, second = pages(table, 0), pages(table, 2)
    assert (len(first), len(second)) == (2, 2)
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert (copies.sources, copies.targets) == ([first[1]], [second[1]])
    assert table.num_free == 12 - 1 - 3


def test_a_full_prompt_needs_no_copy_and_each_row_its_own_next_page(table: PageTable) -> None:
    assert table.start([0, 1], 4).sources == []

    missing = table.missing_for(np.array([4, 4]))
    assert missing.tolist() == [0, 1]
    table.extend(missing)
    assert pages(table, 0)[1] != pages(table, 1)[1]
    assert table.missing_for(np.array([5, 5])).size == 0


def test_a_shared_page_is_free_once_the_last_row_leaves(table: PageTable) -> None:
    table.start([0, 1], 4)
    table.release(0)
    assert table.num_free == 10
    table.missing_for(np.array([0, 0]))  # rows without a sample hold none
    assert table.num_free == 11
    assert not table.table.any()


def test_places_follow_the_pages_and_rows_without_a_sample_are_nobodys(table: PageTable) -> None:
    table.start([1], 6)
    first, second = pages(table, 1)

    assert table.places_of(1, 6).tolist() == [*range(4 * first, 4 * first + 4), 4 * second, 4 * second + 1]
    assert table.places(np.array([0, 6])).tolist() == [0, 4 * second + 2]


def test_a_row_that_moves_takes_its_pages_along(table: PageTable) -> None:
    table.start([0], 3)
    table.start([3], 6)
    held, version = pages(table, 3), table.version

    table.move(3, 0)

    assert (pages(table, 0), pages(table, 3)) == (held, [])
    assert table.num_free == 11 - 2
    assert table.version > version
