"""Rollout, reward, sandbox and trainer answer what their ``/openapi.json`` says, with each sort of token and none.

Each is served on a socket as in a fleet, with a state in memory behind it; the sandbox's is real.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis
import uvicorn
from fastapi import FastAPI
from schemathesis import checks
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from flotilla.services.reward.app import create_app as reward_app
from flotilla.services.rollout.app import create_app as rollout_app
from flotilla.services.sandbox.app import create_app as sandbox_app
from flotilla.services.sandbox.settings import SandboxSettings
from flotilla.services.trainer.app import create_app as trainer_app
from flotilla.shared.environment.settings import ServiceSettings
from flotilla.shared.net.server.serving import address_of, bind, config_of
from flotilla.shared.schemas.service import ObservedState
from flotilla.shared.weights.image.image import WeightImage
from tests.unit.rollout.agents.world import World

pytestmark = pytest.mark.long

TOKEN = "a token that is long enough"
TOKENS = [TOKEN, None, "wrong"]
EXPERIMENT = "e-1"
SHORT_SECONDS = 0.2
CHECKS = (
    checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
)
MOST_EXAMPLES = 15
SETTINGS = hypothesis.settings(
    max_examples=MOST_EXAMPLES,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
)


def a_state(**service: Any) -> Any:
    """Make what the routes of a service find."""
    following = SimpleNamespace(observe=ObservedState, notify=lambda: None, **service)
    return SimpleNamespace(service=following, membership=SimpleNamespace(is_connected=True))


@asynccontextmanager
async def plain_state(*_: Any, **__: Any) -> AsyncIterator[Any]:
    yield a_state()


@asynccontextmanager
async def rollout_state(*_: Any, **__: Any) -> AsyncIterator[Any]:
    async with World().running() as world:
        await world.issue(500)
        yield a_state(agents={EXPERIMENT: world.episodes}.get)


def trainer_state(directory: Path) -> Any:
    @asynccontextmanager
    async def opened(_settings: Any, _address: str, images: Any, _credentials: Any) -> AsyncIterator[Any]:
        image = WeightImage.create(4096, directory=directory)
        await images.offer(1, image.path, image.checksum())
        try:
            yield a_state()
        finally:
            image.close()

    return opened


SERVICE = ServiceSettings("http://gateway", TOKEN, "redis://nowhere")
SANDBOX = SandboxSettings.model_validate(
    {"token": TOKEN, "level": "C", "concurrency": 2, "sessions": 1, "spare": 0, "queue_seconds": 30}
)


def never(*_: Any, **__: Any) -> AbstractAsyncContextManager[Any]:
    raise AssertionError("it is only described")


ROLLOUT = schemathesis.openapi.from_dict(rollout_app(SERVICE, "http://r", open_state=never).openapi())
REWARD = schemathesis.openapi.from_dict(reward_app(SERVICE, "http://r", open_state=never).openapi())
TRAINER = schemathesis.openapi.from_dict(trainer_app(SERVICE, "http://t", open_state=never).openapi())
SANDBOXES = schemathesis.openapi.from_dict(sandbox_app(SANDBOX, never).openapi())


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """Serve an app in a thread of its own; gives its URL."""
    listening = bind("127.0.0.1", 0)
    url = address_of(listening)
    up, loop = threading.Event(), asyncio.new_event_loop()
    server: list[uvicorn.Server] = []

    async def serve() -> None:
        async with app.router.lifespan_context(app) as opened:

            async def with_state(scope: Any, receive: Any, send: Any) -> None:
                await app(scope | {"state": dict(opened or {})}, receive, send)

            server.append(uvicorn.Server(config_of(with_state)))
            up.set()
            await server[0].serve(sockets=[listening])

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert up.wait(60)
    try:
        yield url
    finally:
        server[0].should_exit = True
        thread.join(60)
        loop.close()


@pytest.fixture(scope="module")
def rollout() -> Iterator[str]:
    with served(rollout_app(SERVICE, "http://r", open_state=rollout_state)) as url:
        yield url


@pytest.fixture(scope="module")
def reward() -> Iterator[str]:
    with served(reward_app(SERVICE, "http://r", open_state=plain_state)) as url:
        yield url


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    opened = trainer_state(tmp_path_factory.mktemp("weights"))
    with served(trainer_app(SERVICE, "http://t", open_state=opened)) as url:
        yield url


@pytest.fixture(scope="module")
def sandbox() -> Iterator[str]:
    with served(sandbox_app(SANDBOX)) as url:
        yield url


def headers_of(token: str | None) -> dict[str, str]:
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def ask(case: Any, url: str, token: str | None) -> None:
    """Ask, for what is there where that can be named, and hold the answer against the description."""
    parameters = case.path_parameters or {}
    if "experiment_id" in parameters and token == TOKEN:
        parameters["experiment_id"] = EXPERIMENT
    if "version" in parameters and token == TOKEN and isinstance(parameters["version"], int):
        parameters["version"] %= 2
    if isinstance(case.body, dict):
        for name in ("wait_seconds", "run_timeout", "compile_timeout"):
            if isinstance(case.body.get(name), int | float) and case.body[name] > SHORT_SECONDS:
                case.body[name] = SHORT_SECONDS
    answer = case.call(base_url=url, headers=headers_of(token), timeout=60)
    if answer.status_code == 201 and "token" in (opened := answer.json()):  # a session: the next one needs its place
        known = headers_of(token) | {"Session-Token": opened["token"]}
        assert httpx.delete(f"{url}/sessions/{opened['id']}", headers=known, timeout=60).status_code == 204
    # Whoever has no token is told so before anybody looks for a route.
    case.validate_response(answer, checks=(*CHECKS, unsupported_method) if token == TOKEN else CHECKS)


@ROLLOUT.parametrize()
@pytest.mark.parametrize("token", TOKENS)
@SETTINGS
def test_a_rollout_gives_documented_answers(rollout: str, case: Any, token: str | None) -> None:
    ask(case, rollout, token)


@REWARD.parametrize()
@pytest.mark.parametrize("token", TOKENS)
@SETTINGS
def test_a_reward_gives_documented_answers(reward: str, case: Any, token: str | None) -> None:
    ask(case, reward, token)


@TRAINER.parametrize()
@pytest.mark.parametrize("token", TOKENS)
@SETTINGS
def test_a_trainer_gives_documented_answers(trainer: str, case: Any, token: str | None) -> None:
    ask(case, trainer, token)


@SANDBOXES.parametrize()
@pytest.mark.parametrize("token", TOKENS)
@SETTINGS
def test_a_sandbox_gives_documented_answers(sandbox: str, case: Any, token: str | None) -> None:
    ask(case, sandbox, token)


def test_what_lives_is_reached_as_well(sandbox: str, rollout: str, trainer: str) -> None:
    known = headers_of(TOKEN)
    opened = httpx.post(f"{sandbox}/sessions", json={}, headers=known, timeout=60)
    episode = httpx.post(f"{rollout}/v1/experiments/{EXPERIMENT}/episodes", json={}, headers=known, timeout=60)
    weights = httpx.get(f"{trainer}/v1/weights/1", headers=known)

    assert (opened.status_code, episode.status_code, weights.status_code) == (201, 201, 200)
