import asyncio
import json
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from typing import Any

import httpx
import pytest

from services.reward.address_policy import AddressRefused, is_public, permitted_address
from services.reward.remote import RemoteVerifier, parse_grades, parse_openrlhf, request_id
from shared.clock import ManualClock
from shared.config.reward import RemoteConfig
from shared.errors import GradingFailed
from shared.schemas.grading import Grade, GradingRequest
from shared.schemas.trajectory import GradeStatus
from shared.security import signature
from tests.unit.reward.builders import a_sample

PUBLIC = "93.184.215.14"
SAMPLES = [a_sample("good", "l", id="7/0", metadata={"k": [1]}), a_sample("bad", id="7/1")]
Answer = Callable[[httpx.Request], httpx.Response]


def resolving(*addresses: str) -> Callable[[str, int], Any]:
    async def resolve(_host: str, _port: int) -> Sequence[str]:
        return addresses

    return resolve


def a_verifier(
    *answers: Answer | httpx.Response,
    secret: str | None = None,
    addresses: Sequence[str] = (PUBLIC,),
    **fields: Any,
) -> tuple[RemoteVerifier, list[httpx.Request]]:
    requests: list[httpx.Request] = []
    left = list(answers)

    def handle(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        answer = left.pop(0) if len(left) > 1 else left[0]
        return answer if isinstance(answer, httpx.Response) else answer(request)

    config = RemoteConfig.model_validate({"url": "https://grader.example:8443/grade"} | fields)
    client = httpx.AsyncClient(transport=httpx.MockTransport(handle))
    verifier = RemoteVerifier(
        config, "exp", client, secret, resolver=resolving(*addresses), clock=ManualClock(5000.0), backoff_seconds=0
    )
    return verifier, requests


def grades(*given: dict[str, Any]) -> httpx.Response:
    return httpx.Response(200, json={"grades": list(given)})


GOOD = ({"reward": 1.0, "components": {"fact": 1.0}, "metrics": {"ms": 3}}, {"reward": None, "reason": "no idea"})


async def test_an_answer_becomes_grades() -> None:
    verifier, _ = a_verifier(grades(*GOOD))

    first, second = await verifier.score(SAMPLES)

    assert (first.reward, first.components, first.metrics) == (1.0, {"fact": 1.0}, {"ms": 3.0})
    assert (second.status, second.reason) == (GradeStatus.ABSTAINED, "no idea")


async def test_the_request_carries_all_and_is_signed() -> None:
    verifier, (requests) = a_verifier(grades(*GOOD), secret="s3cret")

    await verifier.score(SAMPLES)

    (request,) = requests
    parsed = GradingRequest.model_validate_json(request.content)
    assert (parsed.experiment, list(parsed.samples)) == ("exp", SAMPLES)
    assert parsed.id == request.headers["idempotency-key"] == request_id("exp", SAMPLES)
    timestamp = request.headers["x-flotilla-timestamp"]
    assert timestamp == "5000"
    assert request.headers["x-flotilla-signature"] == "sha256=" + signature("s3cret", timestamp, request.content)


async def test_without_a_secret_nothing_is_signed() -> None:
    verifier, requests = a_verifier(grades(*GOOD))

    await verifier.score(SAMPLES)

    assert "x-flotilla-signature" not in requests[0].headers


async def test_the_connection_goes_to_the_checked_address_under_the_name() -> None:
    verifier, requests = a_verifier(grades(*GOOD))

    await verifier.score(SAMPLES)

    assert requests[0].url.host == PUBLIC
    assert requests[0].headers["host"] == "grader.example:8443"
    assert requests[0].extensions["sni_hostname"] == "grader.example"


async def test_a_retry_is_the_same_request() -> None:
    verifier, requests = a_verifier(httpx.Response(503), httpx.Response(429), grades(*GOOD))

    first, _ = await verifier.score(SAMPLES)

    assert first.reward == 1.0
    assert len({request.headers["idempotency-key"] for request in requests}) == 1
    assert len({request.content for request in requests}) == 1
    assert len(requests) == 3


def fail_to_connect(_request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


@pytest.mark.parametrize(
    ("answer", "attempts", "reason"),
    [
        (httpx.Response(503), 4, "answered 503"),
        (fail_to_connect, 4, "does not answer"),
        (httpx.Response(400), 1, "refused the request with 400"),
        (httpx.Response(401, json={"detail": "key k1 is\nrevoked", "code": 7}), 1, "with 401: key k1 is revoked"),
        (httpx.Response(403, text="<b>no\x1b[31m</b>"), 1, "with 403: <b>no [31m</b>"),
        (httpx.Response(422, json={"why": ["a"]}), 1, 'with 422: {"why":["a"]}'),
        (httpx.Response(429, json={"error": "quota is used up"}), 4, "answered 429: quota is used up"),
        (httpx.Response(302, headers={"location": "http://127.0.0.1/"}), 1, "302"),
        (httpx.Response(202), 1, "no callback"),
        (httpx.Response(200, text="<html>"), 1, "not JSON"),
        (httpx.Response(200, json=[1]), 1, "no list `grades`"),
        (grades({"reward": 1.0}), 1, "1 grades for 2 samples"),
        (httpx.Response(200, json={"version": 2, "grades": GOOD}), 1, "schema version 2"),
        (httpx.Response(200, json={"id": "another", "grades": GOOD}), 1, "id of another request"),
        (grades(*GOOD, {"reward": 1.0}), 1, "3 grades for 2 samples"),
    ],
)
async def test_a_grader_that_fails_is_an_error_of_every_sample(answer: Any, attempts: int, reason: str) -> None:
    verifier, requests = a_verifier(answer)

    found = await verifier.score(SAMPLES)

    assert [grade.status for grade in found] == [GradeStatus.ERROR] * 2
    assert [grade.reward for grade in found] == [None] * 2
    assert reason in (found[0].reason or "")
    assert len(requests) == attempts


@pytest.mark.parametrize(
    "bad",
    ['{"reward": NaN}', '{"reward": Infinity}', '{"reward": "x"}', '{"status": "error", "reward": 0}', "3", "null"],
)
async def test_a_bad_grade_is_an_error_of_its_sample_alone(bad: str) -> None:
    verifier, _ = a_verifier(httpx.Response(200, text=f'{{"grades": [{bad}, {{"reward": 0.5}}]}}'))

    first, second = await verifier.score(SAMPLES)

    assert (first.status, first.reward) == (GradeStatus.ERROR, None)
    assert second.reward == 0.5


async def test_no_attempt_begins_after_the_deadline() -> None:
    verifier, requests = a_verifier(httpx.Response(503, headers={"Retry-After": "60"}), deadline_seconds=30)

    found = await verifier.score(SAMPLES)

    assert len(requests) == 1
    assert "failed 1 times" in (found[0].reason or "")


async def test_a_slow_attempt_is_given_up() -> None:
    async def handle(_request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(60)
        return grades(*GOOD)

    config = RemoteConfig(url="http://grader.example/", attempt_seconds=0.01, max_attempts=2)
    client = httpx.AsyncClient(transport=httpx.MockTransport(handle))
    verifier = RemoteVerifier(config, "exp", client, resolver=resolving(PUBLIC), backoff_seconds=0)

    found = await verifier.score(SAMPLES)

    assert found[0].reason == "the grader failed 2 times, at last: no answer in time"


async def test_an_answer_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.reward.remote.MAX_ANSWER_BYTES", 100)
    verifier, _ = a_verifier(httpx.Response(200, text="x" * 101))

    found = await verifier.score(SAMPLES)

    assert "longer than 100 bytes" in (found[0].reason or "")


async def test_no_samples_ask_nobody() -> None:
    verifier, requests = a_verifier(grades())

    assert await verifier.score([]) == []
    assert requests == []


async def test_the_openrlhf_dialect_speaks_its_lists() -> None:
    answer = {"rewards": [1.0, None], "scores": [0.7, 0.1], "extra_logs": {"length": [4, 5]}}
    verifier, requests = a_verifier(httpx.Response(200, json=answer), dialect="openrlhf")

    first, second = await verifier.score(SAMPLES)

    assert json.loads(requests[0].content) == {"query": ["pgood", "pbad"], "prompts": ["p", "p"], "labels": ["l", ""]}
    assert (first.reward, first.metrics) == (1.0, {"length": 4.0, "score": 0.7})
    assert second.status is GradeStatus.ABSTAINED


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"rewards": 1.0},
        {"rewards": [1.0]},
        {"rewards": [1, 2], "scores": [1]},
        {"rewards": [1, 2], "extra_logs": 3},
    ],
)
def test_openrlhf_lists_of_another_length_are_refused(answer: dict[str, Any]) -> None:
    with pytest.raises(GradingFailed):
        parse_openrlhf(answer, 2)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "1", True, [1.0]])
def test_an_openrlhf_reward_that_is_no_number_is_an_error(reward: Any) -> None:
    (found,) = parse_openrlhf({"rewards": [reward]}, 1)

    assert found.status is GradeStatus.ERROR


def test_grades_keep_their_order() -> None:
    assert parse_grades({"id": "r", "grades": [{"reward": 1}, {"reward": 2}]}, 2, "r") == [
        Grade.scored(1.0),
        Grade.scored(2.0),
    ]


@pytest.mark.parametrize(
    ("address", "public"),
    [
        (PUBLIC, True),
        ("2606:2800:21f:cb07:6820:80da:af6b:8b2c", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.0.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1", False),
        ("fc00::1", False),
        ("fec0::1", False),
        ("ff02::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:93.184.215.14", True),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
    ],
)
def test_only_the_public_internet_is_public(address: str, public: bool) -> None:
    assert is_public(ip_address(address)) is public


async def test_a_name_with_one_private_address_is_refused() -> None:
    with pytest.raises(AddressRefused, match="allow_private"):
        await permitted_address("x", 443, allow_private=False, resolver=resolving(PUBLIC, "10.0.0.1"))


async def test_a_private_address_is_refused_before_anything_is_sent() -> None:
    verifier, requests = a_verifier(grades(*GOOD), addresses=["10.0.0.1"])

    found = await verifier.score(SAMPLES)

    assert found[0].status is GradeStatus.ERROR
    assert "not a public address" in (found[0].reason or "")
    assert requests == []


async def test_a_private_address_is_used_if_it_is_allowed() -> None:
    verifier, requests = a_verifier(grades(*GOOD), addresses=["10.0.0.1"], allow_private=True)

    await verifier.score(SAMPLES)

    assert requests[0].url.host == "10.0.0.1"


async def test_an_ipv6_address_makes_a_right_url() -> None:
    verifier, requests = a_verifier(grades(*GOOD), addresses=["2606:2800:21f:cb07:6820:80da:af6b:8b2c"])

    await verifier.score(SAMPLES)

    assert str(requests[0].url) == "https://[2606:2800:21f:cb07:6820:80da:af6b:8b2c]:8443/grade"


async def test_an_address_written_into_the_url_is_checked_too() -> None:
    verifier = RemoteVerifier(RemoteConfig(url="http://[::1]:9/"), "exp", httpx.AsyncClient())

    (found,) = await verifier.score([a_sample("x")])

    assert "not a public address" in (found.reason or "")
