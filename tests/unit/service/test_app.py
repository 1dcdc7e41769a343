"""A service is ready when the gateway answers and its work has no failure, not merely when its process lives."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from flotilla.shared.schemas.service import Failure, ObservedState
from flotilla.shared.service.app import at_work, create_service_app


class ScriptedService:
    def __init__(self, failure: Failure | None) -> None:
        self.failure = failure
        self.notify: Callable[[], None] = lambda: None

    def observe(self) -> ObservedState:
        return ObservedState(failure=self.failure)

    async def run(self) -> None:
        await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def serving(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """Enter the lifespan and pass its state on, as a server does."""
    async with app.router.lifespan_context(app) as state:

        async def with_state(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, "state": dict(state)}, receive, send)

        transport = httpx.ASGITransport(with_state)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            yield client


@pytest.mark.parametrize(
    ("is_connected", "failure", "status", "words"),
    [
        (True, None, 200, "ready"),
        (False, None, 503, "the gateway does not answer"),
        (True, Failure(component="rollout", cause="the weight endpoint took 60 s", fatal=False), 503, "took 60 s"),
        (True, Failure(component="trainer", cause="no config.json"), 503, "no config.json"),
    ],
)
async def test_readiness_tells_what_keeps_a_service_from_working(
    is_connected: bool, failure: Failure | None, status: int, words: str
) -> None:
    @contextlib.asynccontextmanager
    async def open_state() -> AsyncIterator[Any]:
        yield SimpleNamespace(service=ScriptedService(failure), membership=SimpleNamespace(is_connected=is_connected))

    async with serving(create_service_app("trial", "flotilla.shared.service", open_state)) as client:
        answer = await client.get("/readyz")
        alive = await client.get("/healthz")

    assert (answer.status_code, alive.status_code) == (status, 200)
    assert words in answer.text


async def test_work_that_is_cancelled_by_nobody_ends_the_process_instead_of_leaving_it_alive_and_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    signals: list[int] = []
    monkeypatch.setattr("signal.raise_signal", signals.append)
    service = ScriptedService(None)
    service.run = cancelled  # type: ignore[method-assign]

    async with at_work(service, SimpleNamespace(notify=print, run=asyncio.Event().wait)):  # type: ignore[arg-type]
        async with asyncio.timeout(3):
            while not signals:
                await asyncio.sleep(0)
        assert signals == [signal.SIGTERM]

    assert signals == [signal.SIGTERM], "what is ended on purpose is no surprise"


async def cancelled() -> None:
    raise asyncio.CancelledError
