import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Callable, Sequence
from ipaddress import ip_address
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from flotilla.services.reward.grader_call import parse_grades, parse_openrlhf
from flotilla.services.reward.remote import RemoteVerifier, request_id
from flotilla.shared.clock import ManualClock
from flotilla.shared.config.sections.reward import RemoteConfig
from flotilla.shared.environment.settings import LOOPBACK, IPNetwork, networks_from
from flotilla.shared.errors import GradingFailed, InvalidRequest
from flotilla.shared.net.authorisation.tokens import signature
from flotilla.shared.net.client.address_policy import AddressRefused, is_public, permitted_address
from flotilla.shared.schemas.grading import MAX_REASON_CHARACTERS, Grade, GradingRequest
from flotilla.shared.schemas.trajectory import GradeStatus
from tests.unit.reward.builders import a_sample

PUBLIC = "93.184.215.14"
DIGITS = b"1" * 400
DEEP = b'{"reward": ' * 900 + b"1" + b"}" * 900
HOSTILE_BODIES = [
    b'{"grades": [{"reward": %s}, {"reward": -%s}], "rewards": [%s, -%s]}' % (DIGITS, DIGITS, DIGITS, DIGITS),
    b'{"grades": [{"reward": 1e999}, {"reward": NaN}], "rewards": [Infinity, NaN]}',
    b'{"grades": [{"reward": 1, "components": {"a": %s}}, {"reward": "x"}], "rewards": ["1", {}]}' % DIGITS,
    b"[" * 20_000,
    b'{"grades": ' + b"[" * 20_000,
    b'{"grades": [%s, {"reward": []}], "rewards": [%s, []]}' % (DEEP, DEEP),
    b"[" + b"[]," * 300_000 + b"[]]",
    b'{"grades": [{"metrics": {%s}}, 7], "rewards": 7}' % b",".join(b'"m%d": 1' % n for n in range(5000)),
    b'{"version": [[[]]], "grades": [], "rewards": {}}',
    b'{"grades": [{"status": "error"}, {"status": "scored"}], "rewards": ["", true]}',
    b"\xff\xfe\x00",
    b"",
    b"x" * 2_000_000,
    b'{"extra_logs": {%s}, "rewards": [1, 2]}' % b",".join(b'"m%d": [1, 2]' % n for n in range(100)),
]


class Stream(httpx.AsyncByteStream):
    """A body as it comes from a socket, in pieces and not decoded."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self._content), 65536):
            yield self._content[start : start + 65536]


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
    private: Sequence[IPNetwork] = LOOPBACK,
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
        config,
        "exp",
        client,
        secret,
        private=private,
        resolver=resolving(*addresses),
        clock=ManualClock(5000.0),
        backoff_seconds=0,
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
    [
        '{"reward": NaN}',
        '{"reward": Infinity}',
        '{"reward": "x"}',
        '{"reward": "1"}',
        '{"reward": "1.0", "status": "scored"}',
        '{"reward": true}',
        '{"reward": false}',
        '{"reward": [1]}',
        '{"reward": null, "status": "scored"}',
        '{"status": "error", "reward": 0}',
        "3",
        "null",
    ],
)
async def test_a_bad_grade_is_an_error_of_its_sample_alone(bad: str) -> None:
    verifier, _ = a_verifier(httpx.Response(200, text=f'{{"grades": [{bad}, {{"reward": 0.5}}]}}'))

    first, second = await verifier.score(SAMPLES)

    assert (first.status, first.reward) == (GradeStatus.ERROR, None)
    assert second.reward == 0.5


@pytest.mark.parametrize(("given", "named"), [('"1"', "the string '1'"), ("true", "the bool true")])
async def test_what_is_no_number_is_named_with_what_is_allowed(given: str, named: str) -> None:
    verifier, _ = a_verifier(httpx.Response(200, text=f'{{"grades": [{{"reward": {given}}}, {{"reward": 0}}]}}'))

    grade = (await verifier.score(SAMPLES))[0]

    assert grade.reason == f"the grader's reward is not valid: a reward is a finite number (int or float), got {named}"


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
    monkeypatch.setattr("flotilla.services.reward.grader_call.MAX_ANSWER_BYTES", 100)
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
    assert "a reward is" in (found.reason or "")


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
        ("2002:5db8:d70e::", False),
        ("192.88.99.1", False),
        ("192.88.98.1", True),
        ("3fff::1", False),
        ("3fff:1000::1", True),
        ("2001:0:4136:e378:8000:63bf:3fff:fdd2", False),
        ("2001:0:7f00:1:8000:63bf:a247:28f1", False),
        ("2606:2800::5efe:10.0.0.1", False),
        ("2606:2800::200:5efe:93.184.215.14", False),
        ("5f00::1", False),
        ("4000::1", False),
    ],
)
def test_only_the_public_internet_is_public(address: str, public: bool) -> None:
    assert is_public(ip_address(address)) is public


async def test_a_name_with_one_private_address_is_refused() -> None:
    with pytest.raises(AddressRefused, match="allow_private"):
        await permitted_address("x", 443, resolver=resolving(PUBLIC, "10.0.0.1"))


async def test_a_private_address_is_refused_before_anything_is_sent() -> None:
    verifier, requests = a_verifier(grades(*GOOD), addresses=["10.0.0.1"])

    found = await verifier.score(SAMPLES)

    assert found[0].status is GradeStatus.ERROR
    assert "not a public address" in (found[0].reason or "")
    assert requests == []


async def test_a_private_address_is_used_if_it_is_allowed() -> None:
    networks = networks_from({"N": "10.0.0.0/8"}, "N", ())
    verifier, requests = a_verifier(grades(*GOOD), addresses=["10.0.0.1"], allow_private=True, private=networks)

    await verifier.score(SAMPLES)

    assert requests[0].url.host == "10.0.0.1"


@pytest.mark.parametrize("address", ["10.0.0.1", "169.254.169.254", "fc00::1", "::ffff:10.0.0.1"])
async def test_a_spec_alone_opens_no_network_but_loopback(address: str) -> None:
    verifier, requests = a_verifier(grades(*GOOD), addresses=[address], allow_private=True)

    found = await verifier.score(SAMPLES)

    assert "FLOTILLA_GRADER_NETWORKS" in (found[0].reason or "")
    assert requests == []


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
async def test_a_grader_on_the_services_own_host_needs_no_setting(address: str) -> None:
    verifier, requests = a_verifier(grades(*GOOD), addresses=[address], allow_private=True)

    assert (await verifier.score(SAMPLES))[0].reward == 1.0
    assert len(requests) == 1


def test_networks_are_read_from_the_environment() -> None:
    assert networks_from({}, "N", LOOPBACK) == LOOPBACK
    assert networks_from({"N": "none"}, "N", LOOPBACK) == ()
    with pytest.raises(InvalidRequest, match="must be networks"):
        networks_from({"N": "10.0.0.0/8 and more"}, "N", LOOPBACK)


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http://:80/",
        "http://[::1/",
        "http://host:99999/",
        "http://host:0/",
        "http://host:abc/",
        "http://a b/",
        "http://a/\n",
        "ftp://host/",
        "host/grade",
        f"http://{'a' * 70}.example\u00e4/",
        "http://\ud800/",
    ],
)
def test_a_malformed_url_is_refused_with_its_spec(url: str) -> None:
    with pytest.raises(ValidationError):
        RemoteConfig(url=url)


@pytest.mark.parametrize(
    "url", ["http://h", "https://u:p@h:1/x?y=z", "http://[::1]:8080/", "http://b\u00fccher.example/"]
)
def test_a_url_that_can_be_asked_is_accepted(url: str) -> None:
    assert RemoteConfig(url=url).url == url


async def test_a_compressed_answer_is_not_unpacked() -> None:
    bomb = gzip.compress(gzip.compress(b" " * 50_000_000))
    headers = {"Content-Encoding": "gzip, gzip"}
    verifier, requests = a_verifier(
        lambda _: httpx.Response(200, stream=Stream(bomb), headers=headers),
        lambda _: httpx.Response(500, stream=Stream(bomb), headers=headers),
    )

    for _ in range(2):
        found = await verifier.score(SAMPLES)
        assert [each.status for each in found] == [GradeStatus.ERROR] * 2
        assert "compressed" in (found[0].reason or "")
    assert requests[0].headers["accept-encoding"] == "identity"


@pytest.mark.parametrize("dialect", ["flotilla", "openrlhf"])
@pytest.mark.parametrize("body", HOSTILE_BODIES, ids=range(len(HOSTILE_BODIES)))
async def test_whatever_a_grader_answers_is_an_error_of_its_samples(dialect: str, body: bytes) -> None:
    verifier, _ = a_verifier(lambda _: httpx.Response(200, stream=Stream(body)), dialect=dialect)

    found = await verifier.score(SAMPLES)

    assert [each.status for each in found] == [GradeStatus.ERROR] * 2
    for each in found:
        each.model_dump_json().encode()


@pytest.mark.parametrize("text", ["\ud800", "x" * 500_000])
async def test_texts_of_a_grader_are_made_harmless(text: str) -> None:
    reply = {
        "grades": [{"reward": 1, "components": {text[:9]: 1.0}, "reason": text, "answer": text[:9]}, {"reason": "r"}]
    }
    body = json.dumps(reply).encode()
    verifier, _ = a_verifier(lambda _: httpx.Response(200, stream=Stream(body)))

    found = await verifier.score(SAMPLES)

    assert found[0].reward == 1.0
    for each in found:
        assert len(each.reason or "") <= MAX_REASON_CHARACTERS
        each.model_dump_json().encode()


async def test_an_ipv6_address_makes_a_right_url() -> None:
    verifier, requests = a_verifier(grades(*GOOD), addresses=["2606:2800:21f:cb07:6820:80da:af6b:8b2c"])

    await verifier.score(SAMPLES)

    assert str(requests[0].url) == "https://[2606:2800:21f:cb07:6820:80da:af6b:8b2c]:8443/grade"


async def test_an_address_written_into_the_url_is_checked_too() -> None:
    verifier = RemoteVerifier(RemoteConfig(url="http://[::1]:9/"), "exp", httpx.AsyncClient())

    (found,) = await verifier.score([a_sample("x")])

    assert "not a public address" in (found.reason or "")
