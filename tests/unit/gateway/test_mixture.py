from collections import Counter
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla.services.gateway.datasets.mixture import ChangedMixture, Mixture, Turn

WEIGHTS = st.lists(st.floats(0.01, 10.0), min_size=2, max_size=5)


@given(weights=WEIGHTS, num_groups=st.integers(1, 3000))
@settings(max_examples=40, deadline=None)
def test_after_any_number_of_groups_each_source_has_had_its_share(weights: list[float], num_groups: int) -> None:
    mixture = Mixture(weights)

    counts = Counter(mixture.turn(group_id).source for group_id in range(num_groups))

    for source, weight in enumerate(weights):
        share = num_groups * weight / sum(weights)
        assert abs(counts[source] - share) <= len(weights), (counts, share)


@given(weights=WEIGHTS)
@settings(max_examples=20, deadline=None)
def test_each_source_counts_its_own_groups_without_a_gap(weights: list[float]) -> None:
    mixture = Mixture(weights)
    turns = [mixture.turn(group_id) for group_id in range(2 * mixture.num_slots + 7)]

    for source in range(len(weights)):
        assert [turn.number for turn in turns if turn.source == source] == list(
            range(sum(turn.source == source for turn in turns))
        )


def test_a_turn_needs_no_history() -> None:
    assert [Mixture([3, 1]).turn(group_id) for group_id in range(500, 520)] == [
        [Mixture([3, 1]).turn(n) for n in range(520)][group_id] for group_id in range(500, 520)
    ]


def test_turns_are_spread_and_only_ratios_count() -> None:
    sources = [Mixture([0.75, 0.25]).turn(group_id).source for group_id in range(16)]

    assert sources == [Mixture([300, 100]).turn(group_id).source for group_id in range(16)]
    assert all(sum(sources[start : start + 4]) == 1 for start in range(0, 16, 4)), "each step of four has its one"


def test_the_turns_are_the_same_on_every_machine() -> None:
    # A run that is resumed elsewhere must go on with the same turns: these numbers never change.
    assert [Mixture([5, 2, 1]).turn(group_id).source for group_id in range(16)] == [
        0,
        1,
        0,
        0,
        2,
        0,
        1,
        0,
        0,
        1,
        0,
        0,
        2,
        0,
        1,
        0,
    ]
    assert Mixture([0.1, 0.2, 0.7]).turn(10**9) == Turn(source=2, number=700000000)


def test_a_rare_source_has_its_turns_in_every_block() -> None:
    mixture = Mixture([1000.0, 1.0])
    sources = [mixture.turn(group_id).source for group_id in range(3 * mixture.num_slots)]
    seen = list(accumulate(sources))

    assert seen[-1] == pytest.approx(len(sources) / 1001, abs=1)


def test_after_a_change_of_weights_each_source_goes_on_with_its_next_row() -> None:
    changed = ChangedMixture([(0, [3, 1]), (70, [1, 3]), (70, [0, 1]), (90, [1, 1])])
    turns = [changed.turn(group_id) for group_id in range(200)]

    assert turns[:70] == [Mixture([3, 1]).turn(n) for n in range(70)], "what was issued stays"
    assert {turn.source for turn in turns[70:90]} == {1}, "a source with weight 0 has no turn"
    for source in (0, 1):
        numbers = [turn.number for turn in turns if turn.source == source]
        assert numbers == list(range(len(numbers))), "no row twice, none left out"
    assert changed.turn(150) == turns[150], "a turn needs no history"


def test_a_source_that_has_no_weight_yet_has_no_turns() -> None:
    assert {Mixture([2, 0, 1]).turn(n).source for n in range(300)} == {0, 2}
