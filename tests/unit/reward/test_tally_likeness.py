"""Answers that nearly repeat each other are found, and short or different ones are not."""

import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla.services.reward import tally as module
from flotilla.services.reward.tally import (
    ALIKE,
    MOST_MEMBERS,
    SKETCH,
    Sketch,
    alike_pair,
    are_alike,
    likeness,
    sketch_of,
)

STORY = "first we add the apples of both baskets and then we take away those that were eaten, so that is what is left"


def told(number: int) -> str:
    return STORY.replace("apples", f"apples{number}")


def other(number: int) -> str:
    return " ".join(f"word{number}x{at}" for at in range(30))


def test_one_other_word_leaves_two_texts_alike() -> None:
    long = " ".join([STORY, other(1)])
    first, second = sketch_of(long), sketch_of(long.replace("apples", "pears"))

    assert first is not None and second is not None
    assert 0.8 <= likeness(first, second) < 1.0
    assert likeness(first, first) == 1.0


def test_a_group_of_one_text_with_small_changes_is_named_by_two_of_its_members() -> None:
    texts = [other(9), *(f"{other(1)} {STORY} {n}" for n in range(3))]

    assert alike_pair(texts) == (1, 2)


def test_different_or_short_or_few_alike_answers_are_none() -> None:
    assert alike_pair([other(n) for n in range(4)]) is None
    assert alike_pair(["#### 4"] * 4) is None
    assert alike_pair([other(1), other(1), other(2), other(3)]) is None
    assert alike_pair([other(1)]) is None


@pytest.mark.parametrize("text", [STORY, f"grüne {STORY} Äpfel – 7  €\n", "１ ２ " * 30 + STORY])
def test_a_sketch_is_made_of_the_runs_of_three_words(text: str) -> None:
    words = text.split()
    runs = {zlib.crc32(" ".join(words[at : at + 3]).encode()) for at in range(len(words) - 2)}

    assert sketch_of(text) == frozenset(sorted(runs)[:SKETCH])


@settings(max_examples=200)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=7))
def test_a_pair_is_found_where_most_members_are_like_one_before_them(kinds: list[int]) -> None:
    """Compared with every pair looked at; kind 0 is too short to tell."""
    texts = ["#### 4" if kind == 0 else other(kind) for kind in kinds]
    alike = [(kinds.index(kind), place) for place, kind in enumerate(kinds) if kind and kind in kinds[:place]]

    assert alike_pair(texts) == (alike[0] if len(alike) > (len(kinds) - 1) / 2 else None)


def test_of_a_large_group_a_bounded_number_of_members_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def counted(first: Sketch, second: Sketch) -> bool:
        compared.append((first, second))
        return are_alike(first, second)

    monkeypatch.setattr(module, "are_alike", counted)

    assert alike_pair([other(n) for n in range(4 * MOST_MEMBERS)]) is None
    half = MOST_MEMBERS // 2
    assert len(compared) == half * (half + 1) // 2, "until the others could no longer be most"
    assert alike_pair([other(1)] * (4 * MOST_MEMBERS)) == (0, 1)


def test_two_are_alike_where_their_likeness_says_so() -> None:
    words = [f"word{at}" for at in range(120)]
    found = set()
    for changed in range(0, 40, 2):
        first, second = (sketch_of(" ".join([*words[:at], *words[40:]])) for at in (40, 40 - changed))
        assert first is not None and second is not None
        found.add(expected := likeness(first, second) >= ALIKE)
        assert are_alike(first, second) == expected
    assert found == {True, False}
