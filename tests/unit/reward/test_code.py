import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from flotilla.services.reward.verifiers.assertions.judge import judge
from flotilla.services.reward.verifiers.code import CodeVerifier, extract_program, is_same_output, parse_cases
from flotilla.shared.config.sections.reward import CodeConfig
from flotilla.shared.schemas.grading import Grade
from flotilla.shared.schemas.trajectory import GradeStatus
from tests.unit.reward.builders import a_sample

LABEL = json.dumps({"inputs": ["1", "2", "3"], "outputs": ["1\n", "4\n", "9\n"]})
RESPONSE = "```python\nprint(int(input()) ** 2)\n```"


def finished(stdout: str = "", return_code: int = 0) -> dict[str, Any]:
    return {
        "status": "Success" if return_code == 0 else "Failed",
        "message": "",
        "run_result": {"status": "Finished", "return_code": return_code, "stdout": stdout, "stderr": ""},
    }


def squares(body: dict[str, Any]) -> dict[str, Any]:
    return finished(f"{int(body['stdin']) ** 2}\n")


def a_verifier(answer: Callable[[dict[str, Any]], Any], **fields: Any) -> tuple[CodeVerifier, list[httpx.Request]]:
    requests: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        given = answer(json.loads(request.content))
        return given if isinstance(given, httpx.Response) else httpx.Response(200, json=given)

    client = httpx.AsyncClient(transport=httpx.MockTransport(handle))
    return CodeVerifier(CodeConfig(**fields), client, "http://sandbox/", "secret", backoff_seconds=0), requests


async def grade(answer: Callable[[dict[str, Any]], Any], response: str = RESPONSE, label: str | None = LABEL) -> Grade:
    verifier, _ = a_verifier(answer)
    (found,) = await verifier.score([a_sample(response, label)])
    return found


async def test_every_case_is_asked_of_the_sandbox_with_the_token() -> None:
    verifier, requests = a_verifier(squares)

    (found,) = await verifier.score([a_sample(RESPONSE, LABEL)])

    assert found.reward == 1.0
    assert found.metrics == {"has_program": 1.0, "cases_passed": 1.0, "cases": 3.0}
    assert {str(request.url) for request in requests} == {"http://sandbox/run_code"}
    assert {request.headers["authorization"] for request in requests} == {"Bearer secret"}
    assert {json.loads(request.content)["code"] for request in requests} == {"print(int(input()) ** 2)\n"}


@pytest.mark.parametrize(("reward", "expected"), [("fraction", 2 / 3), ("all", 0.0)])
async def test_a_wrong_case_costs_its_share_or_all(reward: str, expected: float) -> None:
    verifier, _ = a_verifier(lambda body: squares(body) if body["stdin"] != "2" else finished("5\n"), reward=reward)

    (found,) = await verifier.score([a_sample(RESPONSE, LABEL)])

    assert found.reward == pytest.approx(expected)


@pytest.mark.parametrize(
    "answer",
    [
        finished("1\n", return_code=1),
        {"status": "Failed", "run_result": {"status": "TimeLimitExceeded", "stdout": "1\n"}},
        {"status": "Failed", "compile_result": {"status": "Finished", "return_code": 1}, "run_result": None},
    ],
)
async def test_a_program_that_fails_fails_its_case(answer: dict[str, Any]) -> None:
    found = await grade(lambda _body: answer, label=json.dumps({"inputs": ["1"], "outputs": ["1"]}))

    assert (found.status, found.reward) == (GradeStatus.SCORED, 0.0)


@pytest.mark.parametrize(
    "answer",
    [
        {"status": "SandboxError", "message": "no guard", "run_result": None},
        httpx.Response(503, text="full"),
        httpx.Response(504, text="late"),
        httpx.Response(401, text="who are you"),
        httpx.Response(422, text="no such language"),
        httpx.Response(200, text="not json"),
        httpx.Response(302, headers={"location": "http://elsewhere/"}),
    ],
)
async def test_a_sandbox_that_fails_is_an_error_not_a_zero(answer: Any) -> None:
    found = await grade(lambda _body: answer)

    assert found.status is GradeStatus.ERROR
    assert found.reward is None
    assert "sandbox" in (found.reason or "")


async def test_a_sandbox_that_cannot_be_reached_is_an_error() -> None:
    def refuse(_body: dict[str, Any]) -> None:
        raise httpx.ConnectError("refused")

    found = await grade(refuse)

    assert (found.status, found.reward) == (GradeStatus.ERROR, None)


async def test_a_busy_sandbox_is_asked_again() -> None:
    answers = iter([httpx.Response(503), httpx.Response(504), finished("1\n")])

    found = await grade(lambda _body: next(answers), label=json.dumps({"inputs": ["1"], "outputs": ["1"]}))

    assert found.reward == 1.0


async def test_one_failed_call_makes_the_whole_sample_an_error() -> None:
    broken = {"status": "SandboxError", "message": "m"}

    found = await grade(lambda body: broken if body["stdin"] == "2" else squares(body))

    assert found.status is GradeStatus.ERROR


async def test_an_answer_without_a_program_gets_nothing() -> None:
    found = await grade(squares, response="I cannot.")

    assert (found.reward, found.metrics) == (0.0, {"has_program": 0.0})


@pytest.mark.parametrize(
    "label",
    [None, "", "x", "{}", "[]", '{"inputs": [1], "outputs": []}', '[{"stdin": 1}]', '{"fn_name": "f", "inputs": []}'],
)
async def test_a_label_without_cases_is_an_error(label: str | None) -> None:
    found = await grade(squares, label=label)

    assert found.status is GradeStatus.ERROR


@pytest.mark.parametrize("image", ["swebench/x\nRUN id", "a b", "x" * 501])
async def test_a_row_that_names_no_image_is_an_error_of_its_sample_alone(image: str) -> None:
    verifier, asked = a_verifier(squares, image_column="image")
    sample = a_sample(RESPONSE, LABEL).model_copy(update={"metadata": {"image": image}})

    (found,) = await verifier.score([sample])

    assert found.status is GradeStatus.ERROR and "the row names no image in 'image'" in (found.reason or "")
    assert asked == []


async def test_assertions_are_judged_by_a_program_without_the_answer() -> None:
    def runs(body: dict[str, Any]) -> dict[str, Any]:
        given = json.loads(body["stdin"])
        if "statements" in given:
            assert "def f" not in body["code"] + body["stdin"]
            return finished(json.dumps(judge(given["statements"], given["replies"])) + "\n")
        assert "== 2" not in body["code"] + body["stdin"]
        return finished("" if "exit" in given["program"] else f"true\n[{2 + ('+ 2' in given['program'])}, [1]]\n")

    label = json.dumps({"assert_case": ["assert f(1) == 2"]})

    honest = await grade(runs, "```python\ndef f(x): return x + 1\n```", label)
    wrong = await grade(runs, "```python\ndef f(x): return x + 2\n```", label)
    early = await grade(runs, "```python\nexit(0)\n```", label)

    assert (honest.reward, wrong.reward, early.reward) == (1.0, 0.0, 0.0)


async def test_a_label_that_no_judge_can_follow_is_an_error() -> None:
    def runs(body: dict[str, Any]) -> dict[str, Any]:
        given = json.loads(body["stdin"])
        return finished(json.dumps(judge(given["statements"], given["replies"])) + "\n")

    found = await grade(runs, "```python\ndef f(x): return x\n```", json.dumps({"assert_case": ["assert f(1"]}))

    assert found.status is GradeStatus.ERROR
    assert "SyntaxError" in (found.reason or "")


async def test_only_the_first_cases_are_run_if_asked() -> None:
    verifier, requests = a_verifier(squares, max_cases=2)

    await verifier.score([a_sample(RESPONSE, LABEL)])

    assert len(requests) == 2


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("```python\na\n```\n```python\nb\n```", "b\n"),
        ("```py\na\n```\n```\nresult\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("text `code` text", None),
        ("```python\nnever closed", None),
        ("  ```python\n  a\n  ```", "  a\n"),
    ],
)
def test_the_program_is_the_last_block_of_the_language(response: str, program: str | None) -> None:
    assert extract_program(response, "python") == program


def test_an_answer_that_repeats_itself_is_read_in_no_time() -> None:
    started = time.process_time()

    assert extract_program("```python x\n" * 20_000, "python") is None

    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    ("given", "expected", "same"),
    [("1\n", "1", True), ("1 \n2\n\n", "1\n2", True), ("1\n\n2", "1\n2", False), (" 1", "1", False), ("", "\n", True)],
)
def test_outputs_are_compared_by_line(given: str, expected: str, same: bool) -> None:
    assert is_same_output(given, expected) is same


def test_both_forms_of_cases_are_the_same() -> None:
    lists = parse_cases('{"inputs": ["a"], "outputs": ["b"]}', "python")

    assert parse_cases('[{"stdin": "a", "stdout": "b"}]', "python") == lists
