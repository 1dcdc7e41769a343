import math

import pytest
from pydantic import ValidationError

from flotilla.shared.schemas.grading import Grade, GradingRequest, GradingResponse
from flotilla.shared.schemas.trajectory import GradeStatus
from tests.unit.reward.builders import a_sample


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_makes_an_error(reward: float) -> None:
    grade = Grade.scored(reward)

    assert grade.status is GradeStatus.ERROR
    assert grade.reward is None
    assert "not finite" in (grade.reason or "")


@pytest.mark.parametrize(
    "fields",
    [
        {"status": "scored"},
        {"status": "error", "reward": 0.0, "reason": "r"},
        {"status": "abstained", "reward": 0.0},
        {"status": "error"},
        {"status": "pending"},
        {"reward": "nan"},
        {"reward": 1.0, "components": {"a": math.inf}},
    ],
)
def test_a_grade_that_contradicts_itself_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Grade.model_validate(fields)


def test_a_sender_may_leave_the_status_out() -> None:
    assert Grade.model_validate({"reward": 0.0}).status is GradeStatus.SCORED
    assert Grade.model_validate({"reward": None}).status is GradeStatus.ABSTAINED


def test_requests_and_answers_survive_the_wire() -> None:
    request = GradingRequest(id="r", experiment="e", samples=(a_sample("x", "y", metadata={"a": [1, {"b": None}]}),))
    response = GradingResponse(id="r", grades=(Grade.scored(0.5), Grade.abstained(), Grade.error("why")))

    assert GradingRequest.model_validate_json(request.model_dump_json()) == request
    assert GradingResponse.model_validate_json(response.model_dump_json()) == response


def test_a_reader_ignores_fields_of_a_newer_sender() -> None:
    assert Grade.model_validate({"reward": 1.0, "confidence": 0.9}).reward == 1.0


def test_a_text_that_cannot_be_encoded_is_mended() -> None:
    sample = a_sample("a\ud800b", "é\udfff")

    assert (sample.response, sample.label) == ("a?b", "é?")
    assert sample.model_dump_json()


@pytest.mark.parametrize("answer", [None, "", "7", "é\udfff"])
def test_a_plain_grade_is_what_the_schema_makes_of_it(answer: str | None) -> None:
    whole = Grade(status=GradeStatus.SCORED, reward=0.5, answer=answer)

    assert Grade.scored(0.5, answer=answer) == whole
    assert Grade.scored(0.5, answer=answer).model_dump_json() == whole.model_dump_json()
    assert Grade.scored(1, answer=answer).reward == 1.0
    with pytest.raises(ValidationError):
        Grade.scored(True, answer=answer)
    with pytest.raises(ValidationError):
        Grade.scored(0.5, answer=7)
