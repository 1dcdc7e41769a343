"""A gateway that waits: it says so, names who leads, and answers once it leads itself."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
from fastapi import FastAPI

from flotilla.services.gateway.standby import StandbyGateway
from flotilla.shared.errors import NotLeading, Unavailable


class ScriptedWatch:
    """Sees what it is told."""

    def __init__(self) -> None:
        self.leader: str | None = "http://10.0.0.1:8470"
        self.free = asyncio.Event()
        self.looks = 0

    async def until_free(self) -> None:
        self.looks += 1
        await self.free.wait()


class Leading:
    """The app of a gateway, whose opening fails as often as it is told."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.store = SimpleNamespace(is_in_doubt=False)
        self.is_open = asyncio.Event()
        self.app = FastAPI(lifespan=self.open)

        @self.app.get("/v1/fleet")
        async def fleet() -> dict[str, str]:
            return {"from": "leader"}

        @self.app.get("/healthz")
        async def healthz() -> dict[str, str]:
            return {"status": "ok"}

    @asynccontextmanager
    async def open(self, _app: FastAPI) -> AsyncIterator[dict[str, Any]]:
        if self.failures:
            raise self.failures.pop(0)
        self.is_open.set()
        yield {"gateway": self}
        self.is_open.clear()


@asynccontextmanager
async def a_standby(leading: Leading, watch: ScriptedWatch, ends: list[str]) -> AsyncIterator[httpx.AsyncClient]:
    app = StandbyGateway(leading.app, watch, end=ends.append)
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://me") as client:
        yield client


async def test_a_standby_says_that_it_waits_and_who_leads() -> None:
    async with a_standby(Leading(), ScriptedWatch(), []) as client:
        health = await client.get("/healthz")
        others = [await client.get(path) for path in ("/readyz", "/v1/fleet", "/metrics", "/")]
        change = await client.post("/v1/experiments", json={})

    assert (health.status_code, health.json()) == (200, {"status": "standby", "leader": "http://10.0.0.1:8470"})
    for answer in (*others, change):
        assert (answer.status_code, answer.json()["code"]) == (503, "not_leading")
        assert answer.json()["leader"] == "http://10.0.0.1:8470"


async def test_a_standby_answers_once_it_leads_and_closes_what_it_opened() -> None:
    leading, watch, ends = Leading(), ScriptedWatch(), list[str]()
    async with a_standby(leading, watch, ends) as client:
        watch.free.set()
        await leading.is_open.wait()

        answer = await client.get("/v1/fleet")

    assert (answer.json(), leading.is_open.is_set(), ends) == ({"from": "leader"}, False, [])


async def test_a_standby_waits_again_when_another_was_faster() -> None:
    leading, watch, ends = Leading(NotLeading("another")), ScriptedWatch(), list[str]()
    async with a_standby(leading, watch, ends):
        watch.free.set()
        await leading.is_open.wait()

    assert (watch.looks, ends) == (2, [])


async def test_a_standby_that_cannot_lead_ends_with_the_cause() -> None:
    watch, ends = ScriptedWatch(), list[str]()
    async with a_standby(Leading(Unavailable("no Redis server answers")), watch, ends):
        watch.free.set()
        while not ends:
            await asyncio.sleep(0)

    assert ends == ["no Redis server answers"]


async def test_who_cannot_tell_whether_it_still_leads_answers_nothing_but_its_health() -> None:
    leading, watch = Leading(), ScriptedWatch()
    async with a_standby(leading, watch, []) as client:
        watch.free.set()
        await leading.is_open.wait()
        leading.store.is_in_doubt = True

        refused, health = await client.get("/v1/fleet"), await client.get("/healthz")

    assert (refused.status_code, refused.json()["code"]) == (503, "not_leading")
    assert health.json() == {"status": "ok"}
