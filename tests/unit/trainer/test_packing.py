import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.data.packing import MicroLayout, build_input, lay_out

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@given(LENGTHS, st.integers(8, 200), st.sampled_from(["auto", "packed", "padded"]))
def test_every_sequence_stands_in_exactly_one_row_within_the_budget(
    lengths: list[int], max_tokens: int, packing: str
) -> None:
    layouts = lay_out(lengths, max_tokens=max_tokens, packing=packing)

    assert sorted(number for layout in layouts for number in layout.members) == list(range(len(lengths)))
    for layout in layouts:
        assert all(sum(lengths[number] for number in row) <= layout.width for row in layout.rows)
        assert layout.positions <= max_tokens or len(layout.rows) == 1


@given(LENGTHS)
def test_a_packed_row_is_never_longer_than_the_longest_sequence(lengths: list[int]) -> None:
    layouts = lay_out(lengths, max_tokens=10_000, packing="packed")

    assert max(layout.width for layout in layouts) == max(lengths)


def test_auto_pads_even_lengths_and_packs_uneven_ones() -> None:
    even = lay_out([50] * 64, max_tokens=8192, packing="auto")
    uneven = lay_out([200] * 4 + [10, 70, 40, 90] * 15, max_tokens=8192, packing="auto")

    assert not any(layout.is_packed for layout in even)
    assert all(layout.is_packed for layout in uneven)


def test_padded_sequences_are_cut_where_that_saves_the_most_padding() -> None:
    layouts = lay_out([100] * 20 + [10] * 100, max_tokens=8192, packing="padded")

    assert [(len(layout.rows), layout.width) for layout in layouts] == [(20, 100), (100, 10)]


def test_rows_hold_the_tokens_and_predictors_point_before_the_labels() -> None:
    token_ids = [np.array([5, 6, 7]), np.array([8, 9]), np.array([10, 11, 12, 13])]
    sampled = {0: np.array([1, 2]), 1: np.array([1]), 2: np.array([2, 3])}
    layout = MicroLayout(((2,), (0, 1)), width=5, is_packed=True)

    made = build_input(layout, token_ids, sampled)

    assert made.token_ids.tolist() == [[10, 11, 12, 13, 0], [5, 6, 7, 8, 9]]
    assert made.position_ids.tolist() == [[0, 1, 2, 3, 0], [0, 1, 2, 0, 1]]
    assert made.labels.tolist() == [12, 13, 6, 7, 9]
    assert made.predictors.tolist() == [1, 2, 5, 6, 8]
    mask = made.attention_mask
    assert mask is not None
    assert mask[1, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]
    assert mask.any(-1).all(), "an empty row of the mask would make its softmax NaN"


def test_padded_rows_need_no_mask() -> None:
    layout = MicroLayout(((0,), (1,)), width=3, is_packed=False)

    made = build_input(layout, [np.array([1, 2, 3]), np.array([4, 5])], {0: np.array([2]), 1: np.array([1])})

    assert made.attention_mask is None
    assert torch.equal(made.token_ids, torch.tensor([[1, 2, 3], [4, 5, 0]]))


def test_nothing_makes_no_micro_batch() -> None:
    assert lay_out([], max_tokens=10, packing="auto") == ()


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_a_sequence_beyond_the_budget_makes_a_micro_batch_of_its_own(packing: str) -> None:
    layouts = lay_out([100, 10, 10], max_tokens=40, packing=packing)

    assert next(layout for layout in layouts if 0 in layout.members).positions <= 110
    assert len(layouts) >= 2
