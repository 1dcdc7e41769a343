"""Graders that fail in every way: no failure is a reward, and with spare servers hardly a sample is without one."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from flotilla.services.reward.remote import RemoteVerifier
from flotilla.services.reward.state import groups_at_a_time
from flotilla.shared.config.sections.reward import RemoteConfig, RewardConfig
from flotilla.shared.schemas.grading import Grade
from flotilla.shared.schemas.trajectory import GradeStatus
from tests.unit.reward.builders import a_sample

RIGHT = 0.75
"""What every sample is worth: any other reward is a false one."""
GROUPS, SIZE = 150, 4
Fault = Callable[[], Any]


def right(count: int = SIZE) -> httpx.Response:
    return httpx.Response(200, json={"grades": [{"reward": RIGHT}] * count})


async def hang() -> httpx.Response:
    await asyncio.sleep(60)
    return right()


async def slow() -> httpx.Response:
    await asyncio.sleep(0.02)
    return right()


async def half_closed() -> httpx.Response:
    raise httpx.ReadError("the other side closed the connection in the middle")


async def refused() -> httpx.Response:
    raise httpx.ConnectError("refused")


async def status_500() -> httpx.Response:
    return httpx.Response(500)


async def not_a_number() -> httpx.Response:
    return httpx.Response(200, text='{{"grades": [{}]}}'.format(", ".join(['{"reward": NaN}'] * SIZE)))


async def wrong_length() -> httpx.Response:
    return right(SIZE - 1)


async def other_request() -> httpx.Response:
    return httpx.Response(200, json={"id": "another", "grades": [{"reward": 0.0}] * SIZE})


async def cut_off() -> httpx.Response:
    return httpx.Response(200, text='{"grades": [{"reward": 0')


PASSING = [status_500, half_closed, refused, hang, slow]
LASTING = [not_a_number, wrong_length, other_request, cut_off]


async def graded(faults: list[Any], share: float, hosts: dict[str, float] | None = None) -> list[Grade]:
    """Grade by a grader of which a share of the calls fails; ``hosts`` have shares of their own."""
    dice = random.Random(7)

    async def handle(request: httpx.Request) -> httpx.Response:
        host = request.headers["host"]
        if dice.random() < (hosts or {}).get(host, share):
            found: httpx.Response = await dice.choice(faults)()
            return found
        return right()

    urls = [{"url": f"http://{host}/"} for host in hosts] if hosts else [{"url": "http://93.184.215.14/"}]
    config = RemoteConfig.model_validate(
        {"urls": urls, "attempt_seconds": 0.05, "max_attempts": 12, "breaker_seconds": 0.05}
    )
    client = httpx.AsyncClient(transport=httpx.MockTransport(handle))
    verifier = RemoteVerifier(config, "exp", client, backoff_seconds=0.002)
    groups = [[a_sample("x", id=f"{group}/{n}") for n in range(SIZE)] for group in range(GROUPS)]
    found = await asyncio.gather(*(verifier.score(group) for group in groups))
    await verifier.aclose()
    return [grade for grades in found for grade in grades]


def false_rewards(grades: list[Grade]) -> Counter[float]:
    return Counter(grade.reward for grade in grades if grade.reward is not None and grade.reward != RIGHT)


@pytest.mark.parametrize("fault", [*PASSING, *LASTING], ids=lambda fault: fault.__name__)
async def test_a_fault_in_three_calls_of_ten_is_never_a_reward(fault: Any) -> None:
    grades = await graded([fault], 0.3)

    assert false_rewards(grades) == Counter()
    assert {grade.status for grade in grades} <= {GradeStatus.SCORED, GradeStatus.ERROR}
    if fault in PASSING:
        assert all(grade.status is GradeStatus.SCORED for grade in grades), "what passes is asked again"
    else:
        assert any(grade.status is GradeStatus.ERROR for grade in grades), "what is wrong is an error"


async def test_a_dead_server_beside_a_good_one_costs_no_sample() -> None:
    grades = await graded(PASSING, 0.0, {"93.184.215.14": 1.0, "93.184.215.15": 0.0})

    assert [grade.reward for grade in grades] == [RIGHT] * (GROUPS * SIZE)


async def test_who_waits_for_another_attempt_keeps_nobody_from_asking() -> None:
    asked: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        name = json.loads(request.content)["samples"][0]["id"]
        asked.append(name)
        return httpx.Response(500) if asked.count(name) == 1 and name == "first" else right(1)

    config = RemoteConfig(url="http://93.184.215.14/", concurrency=1)
    verifier = RemoteVerifier(
        config, "exp", httpx.AsyncClient(transport=httpx.MockTransport(handle)), backoff_seconds=0.2
    )

    grades = await asyncio.gather(*(verifier.score([a_sample("x", id=name)]) for name in ("first", "second", "third")))
    await verifier.aclose()

    assert asked == ["first", "second", "third", "first"]
    assert [grade.reward for (grade,) in grades] == [RIGHT] * 3


def test_as_many_groups_are_graded_as_a_graders_concurrency_asks_for() -> None:
    remote = {"kind": "remote", "url": "http://93.184.215.14/", "concurrency": 100}

    assert groups_at_a_time(RewardConfig()) == 32
    assert groups_at_a_time(RewardConfig.model_validate({"components": [remote]})) >= 100
    assert groups_at_a_time(RewardConfig.model_validate({"components": [{**remote, "callback_seconds": 9}]})) >= 1000
