"""What a conformance run finds in graders of which we know what they do wrong."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from flotilla.grader_check import Finding, GraderCheck, Outcome
from flotilla.shared.clock import ManualClock
from flotilla.shared.net.authorisation.tokens import signature

URL = "http://127.0.0.1:8900/"
Grades = Callable[[list[dict[str, Any]]], Any]


def reward_of(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["label"] is None:
        return {"reward": None}
    return {"reward": float(sample["response"].endswith(f"#### {sample['label']}"))}


def right(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [reward_of(each) for each in samples]


async def outcomes(grade: Grades = right, *, secret: str | None = None, checks: bool = True) -> dict[str, Outcome]:
    return {each.check: each.outcome for each in await findings(grade, secret=secret, checks=checks)}


async def findings(
    grade: Grades = right, *, secret: str | None = None, checks: bool = True, answer: httpx.Response | None = None
) -> list[Finding]:
    clock = ManualClock(10_000.0)

    def handle(request: httpx.Request) -> httpx.Response:
        if answer is not None:
            return answer
        if secret is not None and checks:
            timestamp = request.headers.get("x-flotilla-timestamp", "0")
            expected = f"sha256={signature(secret, timestamp, request.content)}"
            if request.headers.get("x-flotilla-signature") != expected or clock.now() - int(timestamp) > 300:
                return httpx.Response(401)
        try:
            samples = json.loads(request.content)["samples"]
        except ValueError:
            return httpx.Response(400)
        return httpx.Response(200, content=json.dumps({"grades": grade(samples)}))

    client = httpx.AsyncClient(transport=httpx.MockTransport(handle))
    run = GraderCheck(URL, secret=secret, client=client, clock=clock)
    try:
        return await run.run()
    finally:
        await run.close()


async def test_a_grader_that_does_all_is_found_right() -> None:
    found = await outcomes(secret="s3cret")

    assert set(found.values()) == {Outcome.OK}
    assert {"batch of 32", "order", "odd samples", "same id again", "forged signature", "old signature"} <= set(found)


counted = itertools.count()


@pytest.mark.parametrize(
    ("grade", "check", "outcome"),
    [
        (lambda samples: right(samples)[:8], "batch of 32", Outcome.WRONG),
        (lambda samples: [{"reward": float("nan")} for _ in samples], "batch of 32", Outcome.WRONG),
        (lambda samples: sorted(right(samples), key=str), "order", Outcome.WARNING),
        (lambda samples: [{"reward": 0.0} for _ in samples], "odd samples", Outcome.WARNING),
        (lambda samples: [{"reward": float(next(counted))} for _ in samples], "same id again", Outcome.WARNING),
    ],
    ids=["cuts off", "NaN", "sorts", "zero for no label", "another answer each time"],
)
async def test_what_a_grader_does_wrong_is_named(grade: Grades, check: str, outcome: Outcome) -> None:
    found = await outcomes(grade)

    assert found.get(check, found.get("answer")) == outcome


async def test_a_grader_that_accepts_forged_signatures_is_warned_of() -> None:
    found = await outcomes(secret="s3cret", checks=False)

    assert found["forged signature"] == found["old signature"] == Outcome.WARNING


@pytest.mark.parametrize(
    ("answer", "advice"),
    [
        (httpx.Response(500), "this is tried again"),
        (httpx.Response(202), "this is final"),
        (httpx.Response(401), "this is final"),
        (httpx.Response(200, text="<html>"), "this is final"),
    ],
)
async def test_a_grader_that_does_not_answer_is_asked_no_further(answer: httpx.Response, advice: str) -> None:
    (found,) = await findings(answer=answer)

    assert (found.check, found.outcome) == ("answer", Outcome.WRONG)
    assert found.advice.startswith(advice)
