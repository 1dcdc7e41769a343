"""Answers that nearly repeat each other are found, and short or different ones are not."""

import pytest

from flotilla.services.reward import tally as module
from flotilla.services.reward.tally import ALIKE, MOST_MEMBERS, Sketch, alike_pair, are_alike, likeness, sketch_of

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


def test_of_a_large_group_a_bounded_number_of_members_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def counted(first: Sketch, second: Sketch) -> bool:
        compared.append((first, second))
        return are_alike(first, second)

    monkeypatch.setattr(module, "are_alike", counted)

    assert alike_pair([other(n) for n in range(4 * MOST_MEMBERS)]) is None
    assert len(compared) == MOST_MEMBERS * (MOST_MEMBERS - 1) // 2
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
