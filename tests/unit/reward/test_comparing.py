"""Patterns and JSON schemas, in their child process."""

import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from flotilla.services.reward.verifiers.comparing import ComparingVerifier, JsonSchemaVerifier, RegexVerifier
from flotilla.shared.config.sections.reward import ExactConfig, JsonSchemaConfig, RegexConfig
from flotilla.shared.schemas.grading import Grade
from flotilla.shared.schemas.trajectory import GradeStatus
from tests.unit.reward.builders import a_sample

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


async def graded(verifier: ComparingVerifier, *pairs: tuple[str, str | None]) -> Sequence[Grade]:
    try:
        return await verifier.score([a_sample(response, label) for response, label in pairs])
    finally:
        await verifier.aclose()


async def matched(*responses: str, **fields: Any) -> list[tuple[float | None, str | None]]:
    found = await graded(RegexVerifier(RegexConfig(**fields)), *((response, None) for response in responses))
    return [(grade.reward, grade.answer) for grade in found]


async def test_a_response_matches_in_part_or_as_a_whole() -> None:
    assert await matched("call 555-1234", "call", pattern=r"\d{3}-(\d{4})") == [(1.0, "1234"), (0.0, None)]
    assert await matched(" yes \n", "oh yes", "YES", pattern="yes|no", whole=True) == [
        (1.0, "yes"), (0.0, None), (0.0, None)
    ]  # fmt: skip
    assert await matched("YES", pattern="yes", ignore_case=True, correct=2.0) == [(2.0, "YES")]


async def test_the_label_may_be_the_pattern() -> None:
    right, wrong, broken, none = await graded(
        RegexVerifier(RegexConfig()), ("a7", r"a\d"), ("b7", r"a\d"), ("a", "(a"), ("a", None)
    )

    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert broken.status is none.status is GradeStatus.ERROR
    assert "not a regular expression" in (broken.reason or "") and "label" in (none.reason or "")


async def test_a_pattern_without_end_is_an_error_and_the_next_sample_is_graded() -> None:
    began = time.monotonic()
    endless, after = await graded(
        RegexVerifier(RegexConfig(pattern="(a+)+b", timeout_seconds=1.5)), ("a" * 64 + "c", None), ("aab", None)
    )

    assert (endless.status, after.reward) == (GradeStatus.ERROR, 1.0)
    assert "longer than 1.5 s" in (endless.reason or "")
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("pattern", ["(a", "*", "(" * 5000])
def test_a_pattern_that_is_none_is_refused_with_the_spec(pattern: str) -> None:
    with pytest.raises(ValidationError, match="not a regular expression"):
        RegexConfig(pattern=pattern)
    with pytest.raises(ValidationError, match="not a regular expression"):
        ExactConfig(pattern=pattern)


async def test_json_is_checked_against_the_schema() -> None:
    pairs = [
        ('{"x": 1}', 1.0),
        ('Here:\n```json\n{"x": 1}\n```\nDone.', 1.0),
        ('```\n{"x": "a"}\n```\n```JSON\n{"x": 2}\n```', 1.0),
        ('```{"x": 2}```', 1.0),
        ('```json\n{"x": 2}\n```\n```json\n{"x": ', 1.0),
        ('```json\n{"x": 1}\n```\n```json\n{}\n```', 0.0),
        ('{"x": "1"}', 0.0),
        ('so {"x": 1}', 0.0),
        ('{"x": NaN}', 0.0),
        ("", 0.0),
        ("[" * 100_000, 0.0),
    ]
    found = await graded(JsonSchemaVerifier(JsonSchemaConfig(json_schema=POINT)), *((text, None) for text, _ in pairs))

    assert [(grade.reward, grade.reason) for grade in found] == [(reward, None) for _, reward in pairs]
    assert found[0].answer == '{"x": 1}'


async def test_the_label_may_be_the_schema() -> None:
    labels = (json.dumps(POINT), '{"type": "thing"}', "no json", None, '{"$ref": "http://127.0.0.1:9/schema"}')
    right, *others = await graded(JsonSchemaVerifier(JsonSchemaConfig()), *(('{"x": 1}', label) for label in labels))

    assert right.reward == 1.0
    assert [grade.status for grade in others] == [GradeStatus.ERROR] * 4
    assert "not a JSON schema" in (others[0].reason or "") and "not a JSON schema" in (others[1].reason or "")
    assert "Unresolvable" in (others[3].reason or "")


async def test_a_schemas_pattern_without_end_is_an_error() -> None:
    schema = {"type": "string", "pattern": "^(a+)+$"}
    (found,) = await graded(
        JsonSchemaVerifier(JsonSchemaConfig(json_schema=schema, timeout_seconds=1.5)), (f'"{"a" * 64}!"', None)
    )

    assert found.status is GradeStatus.ERROR
