"""Verifiers against real servers: the sandbox, and a grader that checks the signature."""

import asyncio
import hashlib
import hmac
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from flotilla.services.reward.verifiers.code import CodeVerifier
from flotilla.services.reward.verifiers.registry import Surroundings, build_component, build_verifier, new_client
from flotilla.services.sandbox.app import create_app
from flotilla.services.sandbox.settings import SandboxSettings
from flotilla.shared.config.sections.reward import CodeConfig, RemoteConfig, RewardConfig
from flotilla.shared.net.server.serving import address_of, bind
from flotilla.shared.schemas.trajectory import GradeStatus
from tests.unit.reward.builders import a_sample

TOKEN = "a token that is long enough"
SECRET = "shared with the grader"


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    """Serve an app on a free loopback port."""
    listening: socket.socket = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="auto"))
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server._serve(sockets=[listening]))
    while not server.started:
        if task.done():
            await task
        await asyncio.sleep(0.01)
    try:
        yield address_of(listening)
    finally:
        server.should_exit = True
        await task
        listening.close()


async def test_programs_are_graded_by_the_sandbox() -> None:
    settings = SandboxSettings.model_validate({"token": TOKEN, "concurrency": 2})
    cases = json.dumps({"inputs": ["1", "2"], "outputs": ["1", "4"]})
    assertions = json.dumps({"assert_case": ["assert square(3) == 9", "assert square(-1) == 1"]})
    samples = [
        a_sample("```python\nprint(int(input()) ** 2)\n```", cases),
        a_sample("```python\nprint(int(input()) * 2)\n```", cases),
        a_sample("```python\nraise ValueError\n```", cases),
        a_sample("```python\ndef square(x): return x * x\n```", assertions),
        a_sample("```python\ndef square(x): return 9\n```", assertions),
        a_sample("```python\nimport os\nos._exit(0)\n```", assertions),
    ]

    async with serving(create_app(settings)) as url:
        surroundings = Surroundings("exp", sandbox_url=url, sandbox_token=TOKEN)
        verifier = build_verifier(RewardConfig(components=(CodeConfig(),)), surroundings)
        found = await verifier.score(samples)
        await verifier.aclose()

    assert [(grade.reward, grade.reason) for grade in found] == [
        (1.0, None),
        (0.5, None),
        (0.0, None),
        (1.0, None),
        (0.5, None),
        (0.0, None),
    ]


async def test_a_wrong_token_is_an_error_not_a_zero() -> None:
    settings = SandboxSettings.model_validate({"token": TOKEN, "concurrency": 1, "level": "C"})

    async with serving(create_app(settings)) as url:
        verifier = CodeVerifier(CodeConfig(), new_client(), url, "another token")
        (found,) = await verifier.score([a_sample("```python\n1\n```", '{"inputs": [""], "outputs": [""]}')])
        await verifier.aclose()

    assert found.status is GradeStatus.ERROR
    assert "401" in (found.reason or "")


async def grader(scope: Any, receive: Any, send: Any) -> None:
    """A grader as somebody else would write it: it checks the signature by the documentation alone."""
    if scope["type"] != "http":
        return
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    headers = {name.decode(): value.decode() for name, value in scope["headers"]}
    signed = headers["x-flotilla-timestamp"].encode() + b"." + body
    expected = "sha256=" + hmac.new(SECRET.encode(), signed, hashlib.sha256).hexdigest()
    status, answer = 403, {}
    if hmac.compare_digest(expected, headers["x-flotilla-signature"]):
        status = 200
        answer = {"grades": [{"reward": len(sample["response"])} for sample in json.loads(body)["samples"]]}
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


@pytest.mark.parametrize(("secret", "reward"), [(SECRET, 4.0), ("another", None)])
async def test_a_grader_behind_a_url_is_asked_with_a_signature(secret: str, reward: float | None) -> None:
    async with serving(grader) as url:
        port = url.rpartition(":")[2]
        config = RemoteConfig(url=f"http://localhost:{port}/grade", allow_private=True, secret_env="GRADER")
        verifier = build_component(config, Surroundings("exp", secrets={"GRADER": secret}))
        (found,) = await verifier.score([a_sample("four")])
        await verifier.aclose()

    assert found.reward == reward
    assert (found.status is GradeStatus.ERROR) is (reward is None)


async def test_loopback_is_refused_unless_it_is_allowed() -> None:
    async with serving(grader) as url:
        verifier = build_component(RemoteConfig(url=f"{url}/grade"), Surroundings("exp"))
        (found,) = await verifier.score([a_sample("four")])
        await verifier.aclose()

    assert found.status is GradeStatus.ERROR
    assert "127.0.0.1" in (found.reason or "")
