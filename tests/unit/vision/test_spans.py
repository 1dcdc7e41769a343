import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flotilla.shared.errors import DataError
from flotilla.shared.vision.spans import ImageSpan, find_spans, grid_positions

IMAGE = 5


def test_text_counts_all_axes_on() -> None:
    assert grid_positions(4, ()).tolist() == [[0, 1, 2, 3]] * 3


def test_an_image_lies_on_its_grid_and_text_goes_on_behind_its_longer_side() -> None:
    found = grid_positions(9, (ImageSpan(2, 2, 3),))

    assert found.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4), st.integers(1, 4)), max_size=4), st.integers(1, 5))
def test_spans_are_found_where_they_were_put(images: list[tuple[int, int, int]], tail: int) -> None:
    tokens: list[int] = []
    spans = []
    for gap, rows, columns in images:
        tokens += [0] * gap
        spans.append(ImageSpan(len(tokens), rows, columns))
        tokens += [IMAGE] * (rows * columns)
    tokens += [0] * tail

    found = find_spans(np.array(tokens) == IMAGE, [(rows, columns) for _, rows, columns in images], what="it")

    assert found == tuple(spans)
    positions = grid_positions(len(tokens), found)
    assert positions.min() == 0
    assert positions[:, -1].tolist() == [positions.max()] * 3


@pytest.mark.parametrize("tokens", [[0, 5, 5, 0], [5, 5, 5, 5, 5, 5, 5], [5, 5, 0, 5, 5, 5, 5]])
def test_other_placeholders_than_those_of_the_images_are_refused(tokens: list[int]) -> None:
    with pytest.raises(DataError, match="stand for images"):
        find_spans(np.array(tokens) == IMAGE, [(2, 3)], what="it")
