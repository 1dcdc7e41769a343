"""What every verifier promises, asked of each kind."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from flotilla.services.reward.remote import RemoteVerifier
from flotilla.services.reward.verifiers.base import Verifier
from flotilla.services.reward.verifiers.code import CodeVerifier
from flotilla.services.reward.verifiers.registry import CombinedVerifier, Surroundings, build_component
from flotilla.shared.config.sections.reward import (
    ChoiceConfig,
    CodeConfig,
    CustomConfig,
    ExactConfig,
    FormatConfig,
    JsonSchemaConfig,
    MathConfig,
    NumericConfig,
    RegexConfig,
    RemoteConfig,
    VerlDefaultConfig,
)
from flotilla.shared.schemas.grading import Grade
from flotilla.shared.schemas.trajectory import GradeStatus
from tests.unit.reward.builders import a_sample

SOURCE = "openai/gsm8k"
KINDS = [
    "exact",
    "numeric",
    "math",
    "regex",
    "json_schema",
    "choice",
    "format",
    "custom",
    "code",
    "verl_default",
    "remote",
    "combined",
]
LABELS = {"code": json.dumps({"inputs": [""], "outputs": ["7"]}), "choice": "B", "json_schema": '{"const": 7}'}
ANSWERS = {
    "code": "```python\nprint(7)\n```", "numeric": "#### 7", "math": "$7$", "verl_default": "#### 7",
    "choice": "Answer: B", "format": "<think>3 + 4</think><answer>7</answer>",
}  # fmt: skip


def sandbox_answer(request: httpx.Request) -> httpx.Response:
    result = {"status": "Finished", "return_code": 0, "stdout": "7\n", "stderr": ""}
    return httpx.Response(200, json={"status": "Success", "run_result": result})


def grader_answer(request: httpx.Request) -> httpx.Response:
    samples = json.loads(request.content)["samples"]
    return httpx.Response(200, json={"grades": [{"reward": float("7" in sample["response"])} for sample in samples]})


def a_client(answer: Callable[[httpx.Request], httpx.Response]) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.MockTransport(answer))


async def resolve_public(_host: str, _port: int) -> list[str]:
    return ["93.184.215.14"]


@asynccontextmanager
async def a_verifier(kind: str, folder: Path) -> AsyncIterator[Verifier]:
    (folder / "grader.py").write_text("def grade(sample):\n    return float('7' in sample.response)\n")
    surroundings = Surroundings("exp")
    remote = RemoteConfig(url="http://grader.example/")
    exact = ExactConfig(pattern="(7)")
    makers: dict[str, Callable[[], Verifier]] = {
        "exact": lambda: build_component(exact, surroundings),
        "numeric": lambda: build_component(NumericConfig(), surroundings),
        "math": lambda: build_component(MathConfig(), surroundings),
        "regex": lambda: build_component(RegexConfig(), surroundings),
        "json_schema": lambda: build_component(JsonSchemaConfig(), surroundings),
        "choice": lambda: build_component(ChoiceConfig(), surroundings),
        "format": lambda: build_component(FormatConfig(), surroundings),
        "custom": lambda: build_component(CustomConfig(path=f"{folder}/grader.py:grade"), surroundings),
        "code": lambda: CodeVerifier(CodeConfig(), a_client(sandbox_answer), "http://sandbox", None),
        "verl_default": lambda: build_component(VerlDefaultConfig(), surroundings),
        "remote": lambda: RemoteVerifier(remote, "exp", a_client(grader_answer), resolver=resolve_public),
        "combined": lambda: CombinedVerifier([(exact, build_component(exact, surroundings))]),
    }
    verifier = makers[kind]()
    try:
        yield verifier
    finally:
        await verifier.aclose()


def a_right_sample(kind: str, **fields: Any) -> Any:
    return a_sample(ANSWERS.get(kind, "7"), LABELS.get(kind, "7"), data_source=SOURCE, **fields)


@pytest.mark.parametrize("kind", KINDS)
async def test_there_is_one_grade_per_sample_in_order(kind: str, tmp_path: Path) -> None:
    samples = [a_right_sample(kind, id="a"), a_sample("nothing", LABELS.get(kind, "7"), id="b", data_source=SOURCE)] * 2

    async with a_verifier(kind, tmp_path) as verifier:
        found = await verifier.score(samples)

    assert [grade.reward for grade in found] == [1.0, 0.0, 1.0, 0.0]
    assert all(isinstance(grade, Grade) for grade in found)


@pytest.mark.parametrize("kind", KINDS)
async def test_no_samples_give_no_grades(kind: str, tmp_path: Path) -> None:
    async with a_verifier(kind, tmp_path) as verifier:
        assert await verifier.score([]) == []


@pytest.mark.parametrize(
    "kind", ["exact", "numeric", "math", "regex", "json_schema", "choice", "code", "verl_default", "combined"]
)
async def test_a_missing_label_is_an_error(kind: str, tmp_path: Path) -> None:
    async with a_verifier(kind, tmp_path) as verifier:
        (found,) = await verifier.score([a_sample(ANSWERS.get(kind, "7"), data_source=SOURCE)])

    assert (found.status, found.reward) == (GradeStatus.ERROR, None)
    assert "label" in (found.reason or "")
