"""Several URLs of one grader: weights, fail-over, circuit breaker, and how many requests are under way."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx
import pytest
from pydantic import ValidationError

from flotilla.services.reward.remote import Endpoints, RemoteVerifier
from flotilla.shared.clock import ManualClock
from flotilla.shared.config.sections.reward import RemoteConfig
from flotilla.shared.schemas.trajectory import GradeStatus
from tests.unit.reward.builders import a_sample

A, B = "http://93.184.215.14/a", "http://93.184.215.14/b"
SAMPLES = [a_sample("good", id="7/0")]


class Outage(Exception):
    pass


def some_endpoints(clock: ManualClock, *urls: str, failures: int = 2) -> Endpoints:
    return Endpoints([(url, 1.0) for url in urls], failures=failures, rest_seconds=5.0, now=clock.monotonic)


@contextmanager
def ending(endpoints: Endpoints, url: str) -> Iterator[None]:
    with pytest.raises(Outage), endpoints.asking(url, lambda error: isinstance(error, Outage)):
        yield
        raise Outage


def fail(endpoints: Endpoints, url: str, times: int = 1) -> None:
    for _ in range(times):
        with ending(endpoints, url):
            pass


def test_urls_are_asked_by_their_weights() -> None:
    endpoints = Endpoints([(A, 3.0), (B, 1.0)], failures=2, rest_seconds=5.0, now=ManualClock(0.0).monotonic)

    found = Counter(endpoints.pick() for _ in range(4000))

    assert 2800 < found[A] < 3200


def test_failures_that_are_faster_than_answers_do_not_keep_a_url_resting() -> None:
    endpoints = some_endpoints(ManualClock(100.0), A)
    with endpoints.asking(A, lambda error: True):
        fail(endpoints, A, times=2)
        assert endpoints.pick() is None
        assert endpoints.seconds_until_usable() < 1.0

    assert endpoints.pick() == A


def test_a_url_that_failed_too_often_rests_and_is_then_tried_by_one_call() -> None:
    clock = ManualClock(100.0)
    endpoints = some_endpoints(clock, A)
    fail(endpoints, A, times=2)
    assert endpoints.pick() is None
    assert endpoints.seconds_until_usable() == 5.0

    clock.advance(5.0)
    assert endpoints.pick() == A
    with ending(endpoints, A):
        assert endpoints.pick() is None

    clock.advance(9.0)
    assert endpoints.pick() is None
    clock.advance(1.0)
    with endpoints.asking(A, lambda _: True):
        pass
    fail(endpoints, A)
    assert endpoints.pick() == A


def test_calls_that_were_under_way_when_a_rest_began_do_not_make_it_longer() -> None:
    clock = ManualClock(100.0)
    endpoints = some_endpoints(clock, A)

    fail(endpoints, A, times=20)

    clock.advance(5.0)
    assert endpoints.pick() == A


def a_verifier(failing: Sequence[str], asked: list[str], **fields: object) -> RemoteVerifier:
    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return httpx.Response(503 if request.url.path in failing else 200, json={"grades": [{"reward": 1.0}]})

    urls = [{"url": A, "weight": 1.0}, {"url": B, "weight": 1.0}]
    config = RemoteConfig.model_validate({"urls": urls, "breaker_failures": 2} | fields)
    client = httpx.AsyncClient(transport=httpx.MockTransport(handle))
    return RemoteVerifier(config, "exp", client, clock=ManualClock(0.0), backoff_seconds=1000.0)


async def test_a_request_goes_to_another_url_at_once_and_later_ones_leave_the_dead_one_alone() -> None:
    asked: list[str] = []
    verifier = a_verifier(["/a"], asked)

    async with asyncio.timeout(5):
        found = [(await verifier.score(SAMPLES))[0].reward for _ in range(50)]

    assert found == [1.0] * 50
    assert Counter(asked)["/a"] == 2


USELESS: Sequence[bytes] = (
    b"no JSON",
    b"[" * 20_000,
    b"x" * 2_000_000,
    b'{"grades": []}',
    b'{"grades": [{"reward": 1e999}]}',
    b'{"grades": [{"status": "error", "reason": "the judge is down"}]}',
)


@pytest.mark.parametrize("body", USELESS)
async def test_a_grader_whose_answers_cannot_be_used_is_asked_less_often_and_each_sample_is_an_error(
    body: bytes,
) -> None:
    clock, asked = ManualClock(0.0), 0

    def handle(_request: httpx.Request) -> httpx.Response:
        nonlocal asked
        asked += 1
        return httpx.Response(200, content=body)

    config = RemoteConfig(url=A, breaker_failures=3, breaker_seconds=5.0, deadline_seconds=4.0)
    client = httpx.AsyncClient(transport=httpx.MockTransport(handle))
    verifier = RemoteVerifier(config, "exp", client, clock=clock)

    found = [(await verifier.score(SAMPLES))[0] for _ in range(3)]
    at_rest = [(await verifier.score(SAMPLES))[0] for _ in range(3)]
    asked_before = asked
    clock.advance(5.0)
    await verifier.score(SAMPLES)

    assert {grade.status for grade in found + at_rest} == {GradeStatus.ERROR}
    assert (asked_before, asked) == (3, 4)
    assert all("rests" in grade.reason and found[0].reason[:50] in grade.reason for grade in at_rest)


async def test_one_good_answer_in_between_keeps_a_grader_from_resting() -> None:
    answers = itertools.cycle([b"no JSON", b"no JSON", b'{"grades": [{"reward": 1.0}]}'])
    client = httpx.AsyncClient(
        transport=httpx.MockTransport(lambda _request: httpx.Response(200, content=next(answers)))
    )
    verifier = RemoteVerifier(RemoteConfig(url=A, breaker_failures=3), "exp", client, clock=ManualClock(0.0))

    found = [(await verifier.score(SAMPLES))[0].reward for _ in range(12)]

    assert found == [None, None, 1.0] * 4


async def test_no_more_requests_are_under_way_than_the_grader_is_to_have() -> None:
    under_way, most = 0, 0

    async def handle(_request: httpx.Request) -> httpx.Response:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        return httpx.Response(200, json={"grades": [{"reward": 1.0}]})

    config = RemoteConfig(url=A, concurrency=3)
    verifier = RemoteVerifier(config, "exp", httpx.AsyncClient(transport=httpx.MockTransport(handle)))

    await asyncio.gather(*(verifier.score(SAMPLES) for _ in range(20)))

    assert most == 3


@pytest.mark.parametrize("fields", [{}, {"url": A, "urls": [{"url": B}]}, {"urls": [{"url": A}, {"url": A}]}])
def test_a_grader_has_one_url_or_several_different_ones(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="url"):
        RemoteConfig.model_validate(fields)
