"""Metrics as columns, and experiments without their specs: what the page polls."""

import asyncio
from pathlib import Path
from typing import Any

import httpx

from flotilla.services.gateway.app import create_app
from flotilla.services.gateway.routes import metrics
from flotilla.services.gateway.samples.indexing import AT_ONCE, MAX_OF_ONE
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.services.gateway.state import GatewayState
from flotilla.services.gateway.store.writes import PointRecord
from tests.unit.gateway.builders import a_gateway, add_experiment


def client_of(gateway: GatewayState) -> httpx.AsyncClient:
    app = create_app(GatewaySettings(token="t", redis_url="redis://nowhere", data=Path("/nowhere")))

    async def with_state(scope: Any, receive: Any, send: Any) -> None:
        await app(scope | {"state": {"gateway": gateway}}, receive, send)

    transport, headers = httpx.ASGITransport(with_state), {"Authorization": "Bearer t"}
    return httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers)


def points(name: str, values: list[float], *, first: int = 1) -> list[PointRecord]:
    return [
        PointRecord(name=name, step=step, version=step - 1, value=value, at="1970-01-01T00:00:10.000Z")
        for step, value in enumerate(values, start=first)
    ]


async def test_series_come_as_columns_by_step_and_continue_from_their_cursor(monkeypatch: Any) -> None:
    monkeypatch.setattr(metrics, "SLICE", 2)
    gateway = a_gateway()
    await add_experiment(gateway)
    await gateway.store.put_metrics("tiny-1", points("loss", [0.2, 0.3], first=2) + points("loss", [0.1]))
    await gateway.store.put_metrics("tiny-1", points("kl", [5.0]))
    async with client_of(gateway) as client:
        first = (await client.get("/v1/experiments/tiny-1/series", params={"names": "loss"})).json()
        await gateway.store.put_metrics("tiny-1", points("loss", [0.4], first=4))
        query = {"names": "loss", "after": first["next"]}
        then = (await client.get("/v1/experiments/tiny-1/series", params=query)).json()
        again = (await client.get("/v1/experiments/tiny-1/series", params={**query, "after": then["next"]})).json()

    assert first["items"] == [
        {
            "name": "loss",
            "num_points": 3,
            "steps": [1, 2, 3],
            "versions": [0, 1, 2],
            "values": [0.1, 0.2, 0.3],
            "seconds": [10.0, 10.0, 10.0],
        }
    ]
    assert [each["steps"] for each in then["items"]] == [[4]]
    assert again == {"items": [], "next": then["next"], "common": None}


async def test_a_long_series_is_thinned_and_says_how_long_it_is() -> None:
    gateway = a_gateway()
    await add_experiment(gateway)
    await gateway.store.put_metrics("tiny-1", points("loss", [float(n % 7) for n in range(500)]))
    async with client_of(gateway) as client:
        answer = (await client.get("/v1/experiments/tiny-1/series?names=loss&points=20")).json()["items"][0]

    assert answer["num_points"] == 500
    assert len(answer["steps"]) <= 20
    assert {0.0, 6.0} <= set(answer["values"])


async def test_thinned_series_keep_steps_in_common_so_that_their_parts_can_be_joined() -> None:
    gateway = a_gateway()
    await add_experiment(gateway)
    for name, period in (("lag/tokens/0", 7), ("lag/tokens/1", 11)):
        await gateway.store.put_metrics("tiny-1", points(name, [float(n % period) for n in range(500)]))
    await gateway.store.put_metrics("tiny-1", points("evaluation/accuracy", [0.5]))
    async with client_of(gateway) as client:
        page = (await client.get("/v1/experiments/tiny-1/series?names=lag/*,evaluation/*&points=40")).json()

    assert len(page["common"]) == 12
    by_name = {each["name"]: each["steps"] for each in page["items"]}
    assert by_name.pop("evaluation/accuracy") == [1]
    for steps in by_name.values():
        assert set(page["common"]) <= set(steps) and len(steps) <= 40


async def test_names_are_wanted_and_not_too_many() -> None:
    gateway = a_gateway()
    await add_experiment(gateway)
    async with client_of(gateway) as client:
        answers = [
            await client.get("/v1/experiments/tiny-1/series", params={"names": names})
            for names in (",", ",".join(f"n{n}" for n in range(101)))
        ]
        absent = await client.get("/v1/experiments/other/series?names=loss")

    assert [answer.status_code for answer in answers] == [422, 422]
    assert absent.status_code == 404


async def test_too_many_values_are_refused_before_all_are_read(monkeypatch: Any) -> None:
    monkeypatch.setattr(metrics, "SLICE", 10)
    monkeypatch.setattr(metrics, "MOST_VALUES", 25)
    gateway = a_gateway()
    await add_experiment(gateway)
    await gateway.store.put_metrics("tiny-1", points("kl", [0.0] * 25))
    async with client_of(gateway) as client:
        allowed = await client.get("/v1/experiments/tiny-1/series?names=*")
        await gateway.store.put_metrics("tiny-1", points("loss", [0.0]))
        refused = await client.get("/v1/experiments/tiny-1/series?names=*")

    assert allowed.status_code == 200
    assert (refused.status_code, refused.json()["detail"]) == (422, "too many values: name fewer series")


async def test_a_point_that_is_written_again_between_slices_comes_once(monkeypatch: Any) -> None:
    monkeypatch.setattr(metrics, "SLICE", 2)
    gateway = a_gateway()
    await add_experiment(gateway)
    await gateway.store.put_metrics("tiny-1", points("loss", [0.1, 0.2, 0.3]))
    read, is_written = gateway.store.metrics, False

    async def read_and_write(*args: Any, **options: Any) -> Any:
        nonlocal is_written
        found = await read(*args, **options)
        if not is_written:
            is_written = True
            await gateway.store.put_metrics("tiny-1", points("loss", [0.9]))
        return found

    monkeypatch.setattr(gateway.store, "metrics", read_and_write)
    async with client_of(gateway) as client:
        found = (await client.get("/v1/experiments/tiny-1/series?names=loss")).json()["items"][0]

    assert (found["steps"], found["values"], found["num_points"]) == ([1, 2, 3], [0.9, 0.2, 0.3], 3)


async def test_a_token_has_so_many_series_open_at_once(monkeypatch: Any) -> None:
    gateway = a_gateway()
    await add_experiment(gateway)
    await gateway.store.put_metrics("tiny-1", points("loss", [0.1]))
    read, may_end = gateway.store.metrics, asyncio.Event()
    num_reading = most_reading = 0

    async def read_slowly(*args: Any, **options: Any) -> Any:
        nonlocal num_reading, most_reading
        num_reading += 1
        most_reading = max(most_reading, num_reading)
        await may_end.wait()
        num_reading -= 1
        return await read(*args, **options)

    monkeypatch.setattr(gateway.store, "metrics", read_slowly)
    async with client_of(gateway) as client:
        asked = [asyncio.create_task(client.get("/v1/experiments/tiny-1/series?names=loss")) for _ in range(MAX_OF_ONE)]
        while most_reading < AT_ONCE:
            await asyncio.sleep(0)
        for _ in range(1000):
            await asyncio.sleep(0)
        last = asyncio.create_task(client.get("/v1/experiments/tiny-1/series?names=loss"))
        done, _ = await asyncio.wait([last], timeout=5)
        may_end.set()
        answers = await asyncio.gather(*asked, last)

    assert done == {last}
    assert [answer.status_code for answer in answers] == [200] * MAX_OF_ONE + [429]
    assert most_reading == AT_ONCE


async def test_events_are_listed_from_a_cursor_on() -> None:
    gateway = a_gateway()
    await add_experiment(gateway)
    for version in range(3):
        await gateway.events.append("tiny-1", "publication_announced", version=version)
    async with client_of(gateway) as client:
        first = (await client.get("/v1/experiments/tiny-1/log?limit=2")).json()
        then = (await client.get("/v1/experiments/tiny-1/log", params={"after": first["next"]})).json()
        end = (await client.get("/v1/experiments/tiny-1/log", params={"after": then["next"]})).json()
        absent = await client.get("/v1/experiments/other/log")

    assert [each["data"] for each in first["items"] + then["items"]] == [{"version": 0}, {"version": 1}, {"version": 2}]
    assert end == {"items": [], "next": None}
    assert absent.status_code == 404


async def test_a_list_of_experiments_leaves_their_specs_out_where_nobody_wants_them() -> None:
    gateway = a_gateway()
    await add_experiment(gateway)
    async with client_of(gateway) as client:
        whole = (await client.get("/v1/experiments")).json()["items"][0]
        short = (await client.get("/v1/experiments?spec=false")).json()["items"][0]

    assert whole["spec"]["name"] == "tiny"
    assert short == whole | {"spec": {}}
