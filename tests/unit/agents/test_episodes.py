"""Agents' calls go to the gateway that leads, and what was played is not lost for a gateway's sake."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import httpx
import pytest

from flotilla.agents import episodes
from flotilla.agents.episodes import Gateways, Verdict
from flotilla.shared.errors import InvalidSpec


async def test_of_several_gateways_the_one_that_leads_is_asked_and_kept() -> None:
    leader, asked = "b", list[str]()

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        if request.url.host == "gone":
            raise httpx.ConnectError("no route", request=request)
        if request.url.host == leader:
            return httpx.Response(201, json={"from": leader})
        return httpx.Response(503, json={"code": "not_leading"})

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        gateways = Gateways("http://gone,http://a, http://b/", client)
        first = [await gateways.post("/v1/x", "t", {}) for _ in range(2)]
        leader = "a"
        after = await gateways.post("/v1/x", "t", {})
        leader = "none"
        nobody = await gateways.post("/v1/x", "t", {})

    assert first == [(201, {"from": "b"})] * 2 and after == (201, {"from": "a"})
    assert nobody[0] in {0, 503}
    assert asked == ["gone", "a", "b", "b", "b", "gone", "a", "a", "b", "gone"]


async def test_the_next_gateway_can_tell_a_call_that_it_is_asked_again() -> None:
    keys = list[str]()

    def answer(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["idempotency-key"])
        if request.url.host == "slow":
            raise httpx.ReadTimeout("late", request=request)
        return httpx.Response(200, json={})

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        gateways = Gateways("http://slow,http://b", client)
        for _ in range(2):
            assert await gateways.post("/v1/episodes/e/complete", "t", {"reward": 1.0}) == (200, {})

    assert len(keys) == 3 and keys[0] == keys[1] != keys[2]


async def completed(*verdicts: Verdict, statuses: tuple[int, ...] = (200,)) -> tuple[int, list[tuple[str, Any]]]:
    """Play an episode for each verdict; returns how many were complete, and what was told with which key."""
    given, left, told = list(verdicts), list(statuses), list[tuple[str, Any]]()

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/complete"):
            told.append((request.headers["idempotency-key"], json.loads(request.content)))
            return httpx.Response(left.pop(0) if len(left) > 1 else left[0], json={"detail": "why"})
        if not given:
            return httpx.Response(404, json={})
        fields = {"episode_id": "e", "key": "k", "base_url": "http://g/v1", "model": "m", "task": {}, "seconds": 60.0}
        return httpx.Response(201, json=fields)

    async def play(_: object) -> Verdict:
        return given.pop(0)

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        return await episodes._play(Gateways("http://g", client), "experiment", "t", play), told


async def test_a_reward_is_told_again_until_a_gateway_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes, "PAUSE_SECONDS", 0.0)

    done, told = await completed(Verdict(1.0), statuses=(503, 502, 200))

    assert done == 1
    assert len(told) == 3 and len({key for key, _ in told}) == 1, "it is one call"


async def test_a_reward_that_nobody_takes_is_given_up_and_one_that_is_refused_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(episodes, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(episodes, "COMPLETE_SECONDS", 0.0)

    away, _ = await completed(Verdict(1.0), statuses=(503,))
    refused, told = await completed(Verdict(1.0), statuses=(422,))

    assert away == refused == 0 and len(told) == 1
    assert [getattr(each, "status", None) for each in caplog.records][-1] == 422


async def test_what_is_no_number_is_no_reward_and_no_metric_and_ends_nothing() -> None:
    metrics = {"a" * 300: 1.0, "odd": math.inf, "none": math.nan}

    done, told = await completed(Verdict(math.nan), Verdict(0.5, metrics))

    assert done == 1
    assert [body for _, body in told] == [{"reward": 0.5, "metrics": {"a" * 200: 1.0}}]


def refusing(*answers: tuple[int, dict[str, Any]]) -> httpx.MockTransport:
    left = list(answers)

    def answer(request: httpx.Request) -> httpx.Response:
        status, found = left.pop(0)
        return httpx.Response(status, json=found)

    return httpx.MockTransport(answer)


OPENED = {"episode_id": "e", "key": "k", "base_url": "http://g/v1", "model": "m", "task": {}, "seconds": 0.05}


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_an_experiment_that_hands_out_nothing_to_this_agent_is_an_error_and_not_waited_for(status: int) -> None:
    async with httpx.AsyncClient(transport=refusing((status, {"detail": "why not"}))) as client:
        with pytest.raises(InvalidSpec, match=rf"no episodes of x \({status}\): why not"):
            await episodes._play(Gateways("http://g", client), "x", "t", lambda _: pytest.fail("it plays"))


@pytest.mark.parametrize("answers", [[503, 404], [429, 401], [503, 409], [404], [401], [403]])
async def test_an_experiment_that_is_over_ends_the_agent_and_one_that_never_was_is_said(
    answers: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(episodes, "PAUSE_SECONDS", 0.0)
    transport = refusing(*((status, {"detail": "why"}) for status in answers))

    async with httpx.AsyncClient(transport=transport) as client:
        assert await episodes._play(Gateways("http://g", client), "x", "t", lambda _: pytest.fail("it plays")) == 0

    said = [
        (each.levelname, getattr(each, "detail", None)) for each in caplog.records if each.name == episodes.__name__
    ]
    assert said == ([("WARNING", "why")] if len(answers) == 1 else [])


async def test_an_episode_that_never_ends_is_given_up_when_the_fleet_has() -> None:
    is_over = asyncio.Event()

    async def play(_: object) -> Verdict:
        try:
            await asyncio.Event().wait()
        finally:
            is_over.set()
        raise AssertionError

    async with httpx.AsyncClient(transport=refusing((201, OPENED), (409, {}))) as client:
        done = await asyncio.wait_for(episodes._play(Gateways("http://g", client), "x", "t", play), 5)

    assert done == 0 and is_over.is_set()


async def test_an_agents_own_time_out_is_its_error() -> None:
    async def play(_: object) -> Verdict:
        raise TimeoutError("of the agent")

    async with httpx.AsyncClient(transport=refusing((201, OPENED))) as client:
        with pytest.raises(TimeoutError, match="of the agent"):
            await episodes._play(Gateways("http://g", client), "x", "t", play)


async def test_who_plays_gives_back_what_others_held_that_died_and_what_it_holds_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episodes.holders, "folder_of", lambda _: tmp_path)
    dead, told = ("dead-and-known-to-be", "dead-and-not-heard-of"), list[tuple[str, Any]]()
    for name in dead:
        (tmp_path / name).touch()

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        told.append((request.url.path.rpartition("/")[2], body.get("holder")))
        if request.url.path.endswith("/give-back"):
            return httpx.Response(503 if body["holder"] == dead[1] else 200, json={})
        return httpx.Response(404, json={})

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        gateways = Gateways("http://g", client)
        async with episodes._holding(gateways, "x", "t") as holder:
            await episodes._play(gateways, "x", "t", lambda _: pytest.fail("it plays"), holder)

    assert holder is not None
    assert sorted(told[:2]) == sorted([("give-back", dead[0]), ("give-back", dead[1])])
    assert told[2:] == [("episodes", holder), ("give-back", holder)]
    assert [each.name for each in tmp_path.iterdir()] == [dead[1]], "the next one tells it again"


async def test_without_a_place_for_names_it_plays_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(_: str) -> Path:
        raise PermissionError("read only")

    monkeypatch.setattr(episodes.holders, "folder_of", nowhere)
    transport = httpx.MockTransport(lambda _: httpx.Response(404, json={}))
    async with (
        httpx.AsyncClient(transport=transport) as client,
        episodes._holding(Gateways("http://g", client), "x", "t") as holder,
    ):
        assert holder is None
