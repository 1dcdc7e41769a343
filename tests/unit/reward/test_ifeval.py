"""Checks of instructions: yes to what follows them, no to what does not, an error where they cannot be read."""

import json
from typing import Any

import pytest

from flotilla.services.reward.verifiers.ifeval import CHECKS, IfevalVerifier, repetition_penalty
from flotilla.shared.config.sections.reward import IfevalConfig
from flotilla.shared.schemas.grading import Grade
from tests.unit.reward.builders import a_sample

CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("verify_keywords", {"keyword_list": ["Tea", "milk"]}, "tea with Milk", "tea"),
    ("verify_keyword_frequency", {"word": "tea", "N": 2}, "Tea is tea.", "tea and teas"),
    ("validate_forbidden_words", {"forbidden_words": ["tea"]}, "teas", "no Tea here"),
    ("verify_letter_frequency", {"letter": "e", "N": 2}, "bee E", "be"),
    ("verify_paragraph_count", {"N": 2}, "one\n* * *\ntwo", "one\n\ntwo"),
    ("validate_word_constraint", {"N": 3, "quantifier": "at least"}, "a b c", "a b"),
    ("validate_word_constraint", {"N": 20, "quantifier": "around"}, "w " * 18, "w " * 17),
    ("validate_word_constraint", {"N": 3, "quantifier": "at most"}, "a b c", "a b c d"),
    ("verify_sentence_constraint", {"N": 2, "quantifier": "less than"}, "One.", "One. Two!"),
    ("validate_paragraphs", {"N": 2, "first_word": "then", "i": 2}, "First.\n\nThen so.", "First.\n\nSo then."),
    ("verify_postscript", {"postscript_marker": "P.S."}, "Bye. P.S. One more.", "Bye. P.S."),
    ("validate_placeholders", {"N": 2}, "[name] at [place]", "[name] at []"),
    ("verify_bullet_points", {"N": 2}, "* a\n- b", "* a\n- b\n- c"),
    ("validate_title", {}, "<<On tea>> ...", "On tea"),
    ("validate_choice", {"options": ["yes", "no"]}, "I say yes.", "I cannot tell"),
    ("validate_highlighted_sections", {"N": 2}, "*a* and *b*", "*a* and **"),
    ("validate_sections", {"N": 2, "section_splitter": "Part"}, "Part 1 a Part 2 b", "Part 1 a"),
    ("validate_json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("validate_repeat_prompt", {"original_prompt": "Say it."}, "say it. It.", "It."),
    ("validate_two_responses", {}, "a ****** b", "a ****** a"),
    ("validate_uppercase", {}, "TEA 1", "TEa"),
    ("validate_lowercase", {}, "tea 1", "Tea"),
    ("validate_frequency_capital_words", {"N": 1, "quantifier": "at least"}, "TEA now", "Tea now"),
    ("validate_end", {"end_phrase": "That is all."}, "Tea. That is all.", "That is all. Tea."),
    ("validate_quotation", {}, '"tea"', '"tea'),
    ("validate_no_commas", {}, "tea; milk", "tea, milk"),
]


async def graded(response: str, label: Any, **fields: Any) -> Grade:
    text = label if isinstance(label, str) or label is None else json.dumps(label)
    (grade,) = await IfevalVerifier(IfevalConfig(**fields)).score([a_sample(response, text)])
    return grade


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), CASES)
async def test_an_instruction_is_followed_or_not(name: str, arguments: dict[str, Any], good: str, bad: str) -> None:
    # The data holds every argument of every check, null where it means nothing.
    label = {"func_name": name, "N": None, "quantifier": None, "word": None} | arguments

    assert (await graded(good, label)).reward == 1.0
    assert (await graded(bad, label)).reward == 0.0


def test_every_check_has_a_case() -> None:
    assert {case[0] for case in CASES} == set(CHECKS)


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        (None, "no label"),
        ("not JSON", "is no instruction"),
        ("[1]", "is no instruction"),
        ({"func_name": "validate_response_language", "language": "en"}, "is not checked here"),
        ({"func_name": "verify_bullet_points"}, "has other arguments"),
        ({"func_name": "verify_letter_frequency", "letter": "ab", "N": 1}, "one character"),
        ({"func_name": "validate_word_constraint", "N": 1, "quantifier": "roughly"}, "no way to compare"),
    ],
)
async def test_a_label_that_cannot_be_read_is_an_error_and_no_zero(label: Any, reason: str) -> None:
    grade = await graded("tea", label)

    assert grade.reward is None and reason in str(grade.reason)


async def test_repetition_takes_off_up_to_the_penalty() -> None:
    label = {"func_name": "validate_no_commas"}

    assert (await graded("a b c d e", label, repetition_penalty=0.5)).reward == 1.0
    repeated = await graded("a b c " * 100, label, repetition_penalty=0.5)

    assert repeated.reward == pytest.approx(0.5, abs=0.01)
    assert repetition_penalty("a a a a", largest=0.5) == pytest.approx(-0.25)
    assert repetition_penalty("") == 0.0
