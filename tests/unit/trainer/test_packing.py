import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flotilla.services.trainer.data.packing import PASS_COST_TOKENS, MicroLayout, Prompt, build_input, lay_out

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
    uneven = lay_out([200] * 4 + [10, 70, 40, 90] * 15, max_tokens=8192, packing="auto", hidden_size=512)

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


def test_a_shared_prompt_stands_once_before_its_answers() -> None:
    token_ids = [np.array([5, 6, 7, 8]), np.array([5, 6, 9]), np.array([3, 4])]
    sampled = {0: np.array([2, 3]), 1: np.array([2]), 2: np.array([1])}
    layout = MicroLayout(((2, 0, 1),), width=7, is_packed=True, shared={1: 2})

    made = build_input(layout, token_ids, sampled)

    assert made.token_ids.tolist() == [[3, 4, 5, 6, 7, 8, 9]]
    assert made.position_ids.tolist() == [[0, 1, 0, 1, 2, 3, 2]]
    assert made.labels.tolist() == [4, 7, 8, 9]
    assert made.predictors.tolist() == [0, 3, 4, 3], "each answer's first token is predicted at the end of the prompt"
    assert made.attention_mask is not None
    assert made.attention_mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 1, 0],
        [0, 0, 1, 1, 0, 0, 1],
    ]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=40),
    st.integers(50, 400),
    st.sampled_from(["auto", "packed"]),
)
def test_shared_prompts_leave_each_sequence_in_one_row_behind_one_that_begins_alike(
    drawn: list[tuple[int, int]], max_tokens: int, packing: str
) -> None:
    prompts = [Prompt(number, 5 * number) for number, _ in drawn]
    lengths = [prompt.tokens + answer for prompt, (_, answer) in zip(prompts, drawn, strict=True)]

    layouts = lay_out(lengths, max_tokens=max_tokens, packing=packing, prompts=prompts, hidden_size=512)

    assert sorted(number for layout in layouts for number in layout.members) == list(range(len(lengths)))
    for layout in layouts:
        assert layout.positions <= max_tokens or len(layout.rows) == 1
        for row in layout.rows:
            assert sum(lengths[number] - layout.shared.get(number, 0) for number in row) <= layout.width
            for place, number in enumerate(row):
                if number in layout.shared:
                    leader = next(each for each in reversed(row[:place]) if each not in layout.shared)
                    assert prompts[leader] == prompts[number] and prompts[number].tokens == layout.shared[number]


def test_long_prompts_of_a_group_are_computed_once() -> None:
    lengths, prompts = [400 + 100] * 16, [Prompt(number // 8, 400) for number in range(16)]

    shared = lay_out(lengths, max_tokens=8192, packing="auto", prompts=prompts, hidden_size=1024)
    apart = lay_out(lengths, max_tokens=8192, packing="auto", hidden_size=1024)

    assert sum(each.positions for each in shared) < 0.4 * sum(each.positions for each in apart)


def test_where_a_pass_costs_more_there_are_fewer_of_them() -> None:
    drawn = np.random.default_rng(0).lognormal(np.log(256), 1.0, 64)
    lengths = [24 + int(each) for each in drawn.clip(4, 4096)]

    few, many = (
        lay_out(lengths, max_tokens=65_536, packing="auto", hidden_size=1024, attends_apart=True, pass_cost=cost)
        for cost in (PASS_COST_TOKENS["cuda"], PASS_COST_TOKENS["cpu"])
    )

    assert len(few) == 1 < len(many)
    assert few[0].positions <= 1.2 * sum(lengths)
