"""A model as judge: what it is asked, how its verdicts are read, and that a failed vote is no verdict."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from flotilla.services.reward.verifiers.judge import JudgeVerifier
from flotilla.shared.clock import ManualClock
from flotilla.shared.config.sections.judge import JudgeConfig
from flotilla.shared.schemas.grading import Grade
from flotilla.shared.schemas.trajectory import GradeStatus
from tests.unit.reward.builders import a_sample

Replies = Callable[[int], httpx.Response]


def says(text: str) -> httpx.Response:
    usage = {"prompt_tokens": 1000, "completion_tokens": 10}
    return httpx.Response(200, json={"choices": [{"message": {"content": text}}], "usage": usage})


async def judged(
    *replies: httpx.Response, sample: Any = None, requests: list[httpx.Request] | None = None, **fields: Any
) -> Grade:
    left = list(replies)

    def handle(request: httpx.Request) -> httpx.Response:
        if requests is not None:
            requests.append(request)
        return left.pop(0) if len(left) > 1 else left[0]

    given = {"url": "http://93.184.215.14/v1", "model": "judge", "concurrency": 1} | fields
    client = httpx.AsyncClient(transport=httpx.MockTransport(handle))
    verifier = JudgeVerifier(
        JudgeConfig.model_validate(given), client, "key", clock=ManualClock(0.0), backoff_seconds=0
    )
    (grade,) = await verifier.score([sample or a_sample("It is 7.", "7")])
    await verifier.aclose()
    return grade


async def test_a_judge_is_asked_as_a_chat_and_its_score_is_scaled() -> None:
    requests: list[httpx.Request] = []
    prices = {"dollars_per_million_prompt_tokens": 2.0, "dollars_per_million_completion_tokens": 10.0}

    grade = await judged(
        says("Good.\nScore: 3\nOr rather: Score: **7**"), requests=requests, system="Be fair.", **prices
    )

    assert grade.reward == pytest.approx(0.7)
    assert grade.metrics["cost_dollars"] == pytest.approx(0.0021)
    (request,) = requests
    assert (request.url.path, request.headers["authorization"]) == ("/v1/chat/completions", "Bearer key")
    body = json.loads(request.content)
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert "It is 7." in body["messages"][1]["content"]


async def test_what_the_policy_wrote_is_not_taken_for_a_place() -> None:
    requests: list[httpx.Request] = []
    sample = a_sample("{label} {response}", "the label")

    await judged(says("Score: 1"), sample=sample, requests=requests, template="Q {prompt} A {response}")

    assert "A {label} {response}" in json.loads(requests[0].content)["messages"][0]["content"]


@pytest.mark.parametrize(("aggregate", "reward"), [("mean", (0.1 + 0.1 + 1.0) / 3), ("median", 0.1), ("majority", 0.1)])
async def test_votes_are_put_together(aggregate: str, reward: float) -> None:
    replies = (says("score: 1"), says("score: 1"), says("score: 10"))

    grade = await judged(*replies, votes=3, aggregate=aggregate)

    assert grade.reward == pytest.approx(reward)
    assert grade.metrics["disagreement"] == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (says("I cannot say."), "no verdict"),
        (says("Score: 11"), "no verdict"),
        (httpx.Response(200, json={"choices": []}), "no text"),
        (httpx.Response(200, text="<html>"), "not JSON"),
        (httpx.Response(401, json={"error": "bad key"}), "401: bad key"),
        (httpx.Response(500), "failed 4 times"),
    ],
)
async def test_a_judge_that_gives_no_verdict_is_an_error_not_a_zero(reply: httpx.Response, reason: str) -> None:
    grade = await judged(reply)

    assert (grade.status, grade.reward) == (GradeStatus.ERROR, None)
    assert reason in (grade.reason or "")


async def test_more_than_half_of_the_votes_are_enough() -> None:
    lost = says("?")

    assert (await judged(says("score: 10"), lost, says("score: 10"), votes=3)).reward == 1.0
    assert (await judged(says("score: 10"), lost, lost, votes=3)).status is GradeStatus.ERROR


async def test_verdicts_may_be_words() -> None:
    fields: dict[str, Any] = {"verdicts": {"yes": 1.0, "no": 0.0}, "pattern": r"Verdict: (\w+)"}

    assert (await judged(says("Verdict: YES"), **fields)).reward == 1.0
    assert (await judged(says("Verdict: no"), **fields)).reward == 0.0
    assert (await judged(says("Verdict: maybe"), **fields)).status is GradeStatus.ERROR


@pytest.mark.parametrize(
    "fields", [{"template": "Judge!"}, {"low": 5, "high": 5}, {"aggregate": "median"}, {"verdicts": {}}]
)
def test_what_judges_nothing_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        JudgeConfig.model_validate({"url": "http://j/v1", "model": "m"} | fields)
