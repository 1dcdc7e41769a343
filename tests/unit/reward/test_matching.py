from decimal import Decimal

import pytest
from pydantic import ValidationError

from flotilla.services.reward.verifiers.matching import ExactVerifier, NumericVerifier, parse_number
from flotilla.shared.config.sections.reward import ExactConfig, NumericConfig
from flotilla.shared.schemas.trajectory import GradeStatus
from tests.unit.reward.builders import a_sample


@pytest.mark.parametrize(
    ("config", "response", "label", "reward"),
    [
        (ExactConfig(), " Paris \n", "Paris", 1.0),
        (ExactConfig(), "paris", "Paris", 0.0),
        (ExactConfig(ignore_case=True), "PARIS", "paris", 1.0),
        (ExactConfig(pattern=r"<answer>(.*?)</answer>"), "<answer>a</answer> no, <answer>b</answer>", "b", 1.0),
        (ExactConfig(pattern=r"<answer>(.*?)</answer>"), "b", "b", 0.0),
        (ExactConfig(correct=1.0, incorrect=-1.0), "a", "b", -1.0),
    ],
)
async def test_exact_compares_text(config: ExactConfig, response: str, label: str, reward: float) -> None:
    (grade,) = await ExactVerifier(config).score([a_sample(response, label)])

    assert grade.reward == reward


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        ("so it is #### 42", "42", 1.0),
        ("#### 41 or rather #### 42", "42", 1.0),
        ("#### 1,234.50", "1234.5", 1.0),
        ("#### $18.", "18", 1.0),
        ("#### -7", "-7", 1.0),
        ("#### 7", "-7", 0.0),
        ("42", "42", 0.0),
        ("####", "42", 0.0),
        ("", "42", 0.0),
        ("#### 42", "She has 6 * 7 apples.\n#### 42", 1.0),
        ("#### 0.1", "0.10", 1.0),
        ("#### 1e3", "1000", 1.0),
        ("#### 1e999999999", "1000", 0.0),
    ],
)
async def test_numeric_compares_the_last_number(response: str, label: str, reward: float) -> None:
    (grade,) = await NumericVerifier(NumericConfig()).score([a_sample(response, label)])

    assert grade.reward == reward


async def test_numeric_tolerance_is_absolute_and_inclusive() -> None:
    verifier = NumericVerifier(NumericConfig(tolerance=0.1))

    near, far = await verifier.score([a_sample("#### 3.1", "3.0"), a_sample("#### 3.11", "3.0")])

    assert (near.reward, far.reward) == (1.0, 0.0)


async def test_numeric_pattern_is_the_users() -> None:
    verifier = NumericVerifier(NumericConfig(pattern=r"Answer: (\S+)"))

    (grade,) = await verifier.score([a_sample("Answer: 5", "5")])

    assert grade.reward == 1.0


@pytest.mark.parametrize("label", [None, "a dozen", "nan", "inf", ""])
async def test_a_label_that_is_no_number_is_an_error_not_a_zero(label: str | None) -> None:
    (grade,) = await NumericVerifier(NumericConfig()).score([a_sample("#### 12", label)])

    assert grade.status is GradeStatus.ERROR
    assert grade.reward is None


async def test_exact_without_a_label_is_an_error() -> None:
    (grade,) = await ExactVerifier(ExactConfig()).score([a_sample("x")])

    assert grade.status is GradeStatus.ERROR


@pytest.mark.parametrize(("text", "number"), [("12%", "12"), (" 1,000 ", "1000"), ("x", None), ("1_000", None)])
def test_parse_number_reads_what_people_write(text: str, number: str | None) -> None:
    assert parse_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize("pattern", ["(", "no group"])
def test_a_pattern_that_cannot_find_an_answer_is_refused(pattern: str) -> None:
    with pytest.raises(ValidationError, match=r"regular expression|group"):
        NumericConfig(pattern=pattern)
