"""Letters of multiple choices, and answers between tags."""

import time
from typing import Any

import pytest
from pydantic import ValidationError

from flotilla.services.reward.verifiers.matching import ChoiceVerifier, FormatVerifier
from flotilla.shared.config.sections.reward import ChoiceConfig, FormatConfig
from flotilla.shared.schemas.grading import Grade
from flotilla.shared.schemas.trajectory import GradeStatus
from tests.unit.reward.builders import a_sample


async def choice(response: str, label: str | None = "B", **fields: Any) -> Grade:
    (grade,) = await ChoiceVerifier(ChoiceConfig(**fields)).score([a_sample(response, label)])
    return grade


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("B", "B"),
        ("(B)", "B"),
        ("B. Paris, as A is in Spain.", "B"),
        (r"so \boxed{B}.", "B"),
        (r"so \boxed{\text{B}}", "B"),
        ("<answer> B </answer>", "B"),
        ("Not A. The answer is (B).", "B"),
        ("The answer is B because C is wrong.", "B"),
        ("**Answer:** **B**", "B"),
        ("Final ANSWER: B", "B"),
        ("I take option C", "C"),
        ("Answer: C. No, wait. Answer: B", "B"),
        ("The answer is b", None),
        ("The answer is E", None),
        ("Because of B", None),
        ("Berlin", None),
        ("Answer: Berlin", None),
        ("answerB", None),
        ("A dog", None),
        ("", None),
    ],
)
async def test_the_letter_that_a_response_gives(response: str, letter: str | None) -> None:
    grade = await choice(response)

    assert (grade.answer, grade.reward) == (letter, float(letter == "B"))


@pytest.mark.parametrize("label", ["B", " B ", "(B)", "B) Paris", r"\boxed{B}", "Answer: B"])
async def test_a_label_may_be_more_than_the_letter(label: str) -> None:
    assert (await choice("Answer: B", label)).reward == 1.0


@pytest.mark.parametrize("label", ["E", "", "2", "Berlin"])
async def test_a_label_without_a_letter_is_an_error(label: str) -> None:
    assert (await choice("Answer: B", label)).status is GradeStatus.ERROR


async def test_letters_and_pattern_can_be_given() -> None:
    assert (await choice("Answer: J", "J", letters="ABCDEFGHIJ")).reward == 1.0
    assert (await choice("I choose <<B>>", pattern="<<([A-D])>>", incorrect=-1.0)).reward == 1.0
    assert (await choice("Answer: B", pattern="<<([A-D])>>", incorrect=-1.0)).reward == -1.0
    for letters in ("A", "abcd", "A]"):
        with pytest.raises(ValidationError):
            ChoiceConfig(letters=letters)


@pytest.mark.parametrize("text", ["answer ", r"\boxed{ ", "answer" + ":" * 50, " ", "(", "<answer>", "<think>"])
async def test_hostile_text_takes_little_time(text: str) -> None:
    response = text * 20_000
    began = time.process_time()

    await choice(response)
    await has_format(response)

    assert time.process_time() - began < 2.0  # a quadratic search takes minutes


async def has_format(response: str, prompt: str = "p", **fields: Any) -> bool:
    (grade,) = await FormatVerifier(FormatConfig(**fields)).score([a_sample(response, prompt=prompt)])
    assert grade.answer is None
    return grade.reward == 1.0


@pytest.mark.parametrize(
    ("response", "is_right"),
    [
        ("<think>a</think><answer>b</answer>", True),
        ("\n<think>\na\n</think>\n\n<answer>b</answer>\n", True),
        ("<think>a < b</think><answer><b>1</b></answer>", True),
        ("<answer>b</answer><think>a</think>", False),
        ("<think>a<answer>b</answer></think>", False),
        ("<think>a</think><answer>b", False),
        ("a</think><answer>b</answer>", False),
        ("<think> </think><answer>b</answer>", False),
        ("<think>a</think><answer>b</answer><answer>c</answer>", False),
        ("<think>a<think>c</think><answer>b</answer>", False),
        ("<think>a</think> so <answer>b</answer>", False),
        ("<think>a</think><answer>b</answer>!", False),
        ("x<think>a</think><answer>b</answer>", False),
        ("", False),
    ],
)
async def test_tags_are_each_once_and_in_order(response: str, *, is_right: bool) -> None:
    assert await has_format(response) is is_right


async def test_text_outside_may_be_allowed() -> None:
    text = "x<think>a</think> so <answer>b</answer>!"

    assert await has_format(text, allow_text_outside=True)
    assert not await has_format(text + "<think>", allow_text_outside=True)


async def test_the_prompt_may_have_opened_the_first_tag() -> None:
    prompt, rest = "<|im_start|>assistant\n<think>\n", "a</think><answer>b</answer>"

    assert await has_format(rest, prompt)
    assert await has_format(f"<think>{rest}", prompt)
    assert not await has_format(rest, "What does <think> mean?")


async def test_tags_can_be_named() -> None:
    assert await has_format("<plan>a</plan>", tags=("plan",))
    for tags in ((), ("a", "a"), ("a b",)):
        with pytest.raises(ValidationError):
            FormatConfig(tags=tags)
