"""The examples in docs/reward.md and docs/sandbox.md are what the schemas say."""

import json
import re
from pathlib import Path

from flotilla.services.reward.verifiers.code import parse_cases
from flotilla.shared.schemas.grading import GradingRequest, GradingResponse
from flotilla.shared.schemas.sandbox import (
    CellRequest,
    CellResponse,
    RunCodeRequest,
    RunCodeResponse,
    SessionRequest,
    SessionView,
)

DOCS = Path(__file__).parents[3] / "docs"


def json_blocks(page: str) -> list[str]:
    """Find the JSON objects that begin a line inside code blocks, each up to its end."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    text = "\n".join(block for language, block in fences if not language)
    decoder = json.JSONDecoder()
    found = []
    for match in re.finditer(r"^[{\[]", text, re.MULTILINE):
        _, length = decoder.raw_decode(text[match.start() :])
        found.append(text[match.start() : match.start() + length])
    return found


def test_the_graders_example_is_a_complete_request_and_its_answer() -> None:
    blocks = [block for block in json_blocks("reward.md") if '"version"' in block]

    request = GradingRequest.model_validate_json(blocks[0])
    response = GradingResponse.model_validate_json(blocks[1])

    assert json.loads(request.model_dump_json()) == json.loads(blocks[0])
    assert json.loads(response.model_dump_json()) == json.loads(blocks[1])
    assert len(request.samples) == len(response.grades)
    assert request.id == response.id


def test_the_labels_of_the_code_verifier_are_as_documented() -> None:
    labels = [block for block in json_blocks("reward.md") if '"version"' not in block]

    assert [len(parse_cases(label, "python")) for label in labels] == [1, 1, 1]


def test_the_sandboxs_examples_are_requests_and_their_answers() -> None:
    request, response, *of_a_session = json_blocks("sandbox.md")

    assert RunCodeRequest.model_validate_json(request).language == "python"
    assert json.loads(RunCodeResponse.model_validate_json(response).model_dump_json()) == json.loads(response)
    opened, session, cell, answer = of_a_session
    assert SessionRequest.model_validate_json(opened).language == "python"
    assert json.loads(SessionView.model_validate_json(session).model_dump_json()) == json.loads(session)
    assert CellRequest.model_validate_json(cell).code == "x = 20\nx + 1"
    assert json.loads(CellResponse.model_validate_json(answer).model_dump_json()) == json.loads(answer)
