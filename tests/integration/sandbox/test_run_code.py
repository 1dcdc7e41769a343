"""The service over HTTP, with real programs."""

import asyncio
import base64
import json
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from flotilla.services.sandbox import trees
from flotilla.services.sandbox.app import create_app
from flotilla.services.sandbox.languages import find_languages, find_python
from flotilla.services.sandbox.settings import SandboxSettings
from flotilla.services.sandbox.state import open_state
from flotilla.shared.errors import Unavailable
from flotilla.shared.schemas.sandbox import EXPERIMENT_HEADER
from tests.integration.sandbox.running import TOKEN

AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}


@asynccontextmanager
async def a_client(**fields: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(
        SandboxSettings.model_validate({"token": TOKEN, "concurrency": 2, "sessions": 2, "busy_part": 1} | fields)
    )
    async with app.router.lifespan_context(app) as state:
        transport = httpx.ASGITransport(app=_with_state(app, dict(state or {})))
        async with httpx.AsyncClient(transport=transport, base_url="http://sandbox", headers=AUTHORIZED) as client:
            yield client


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def client() -> AsyncIterator[httpx.AsyncClient]:
    """Of one service for all tests that look at answers alone: to open one takes a second."""
    async with a_client() as opened:
        yield opened


@pytest.fixture(scope="module", params=["A", "C"])
async def client_of_level(request: pytest.FixtureRequest) -> AsyncIterator[httpx.AsyncClient]:
    """Of one service of each level that is there."""
    opening = a_client(level=request.param)
    try:
        opened = await opening.__aenter__()
    except Unavailable as error:
        pytest.skip(f"level {request.param} is not available: {error.detail}")
    try:
        yield opened
    finally:
        await opening.__aexit__(None, None, None)


def _with_state(app: Any, state: dict[str, Any]) -> Any:
    async def call(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "state": dict(state)}, receive, send)

    return call


async def test_a_python_program_runs(client: httpx.AsyncClient) -> None:
    reply = await client.post("/run_code", json={"code": "print(input() * 2)", "language": "python", "stdin": "ab"})

    body = reply.json()
    assert reply.status_code == 200
    assert set(body) == {"status", "message", "compile_result", "run_result", "files", "isolation"}
    assert (body["status"], body["message"], body["compile_result"], body["files"]) == ("Success", "", None, {})
    assert set(body["run_result"]) == {"status", "execution_time", "return_code", "stdout", "stderr"}
    assert body["run_result"]["status"] == "Finished"
    assert body["run_result"]["return_code"] == 0
    assert body["run_result"]["stdout"] == "abab\n"
    assert 0 < body["run_result"]["execution_time"] < 10


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("bash", "read line; echo $line$line"),
        (
            "cpp",
            "#include <iostream>\n#include <string>\nint main() { std::string s; std::cin >> s; std::cout << s << s; }",
        ),
        ("javascript", "const s = require('fs').readFileSync(0, 'utf8').trim(); console.log(s + s)"),
        ("nodejs", "const s = require('fs').readFileSync(0, 'utf8').trim(); console.log(s + s)"),
    ],
)
async def test_other_languages_run_where_their_tool_is(
    client_of_level: httpx.AsyncClient, language: str, code: str
) -> None:
    if {"nodejs": "javascript"}.get(language, language) not in find_languages(find_python(None)):
        pytest.skip(f"there is no tool for {language}")

    reply = await client_of_level.post("/run_code", json={"code": code, "language": language, "stdin": "ab\n"})

    assert reply.json()["run_result"]["stdout"].strip() == "abab", reply.text


@pytest.mark.parametrize(
    ("code", "timeout", "run_status", "return_code"),
    [
        ("raise SystemExit(3)", 60, "Finished", 3),
        ("1 / 0", 60, "Finished", 1),
        ("import os; os.kill(os.getpid(), 11)", 60, "Finished", -11),
        ("import time; time.sleep(60)", 2, "TimeLimitExceeded", None),
    ],
)
async def test_how_a_program_ends_is_told(
    client: httpx.AsyncClient, code: str, timeout: int, run_status: str, return_code: int | None
) -> None:
    reply = await client.post("/run_code", json={"code": code, "language": "python", "run_timeout": timeout})

    body = reply.json()
    assert (body["status"], body["run_result"]["status"]) == ("Failed", run_status)
    assert body["run_result"]["return_code"] == return_code


async def test_a_program_that_does_not_compile_is_not_run(client: httpx.AsyncClient) -> None:
    if "cpp" not in find_languages(find_python(None)):
        pytest.skip("there is no g++")
    reply = await client.post("/run_code", json={"code": "int main( {", "language": "cpp"})

    body = reply.json()
    assert body["status"] == "Failed"
    assert body["compile_result"]["return_code"] == 1
    assert "error" in body["compile_result"]["stderr"]
    assert body["run_result"] is None


async def test_files_go_in_and_out(client: httpx.AsyncClient) -> None:
    given = {"data/in.txt": base64.b64encode(b"\x00\xff").decode(), "helper.py": base64.b64encode(b"N = 2").decode()}
    code = "import helper\nopen('out.bin', 'wb').write(open('data/in.txt', 'rb').read() * helper.N)"

    request = {"code": code, "language": "python", "files": given, "fetch_files": ["out.bin", "none"]}
    reply = await client.post("/run_code", json=request)

    assert reply.json()["files"] == {"out.bin": base64.b64encode(b"\x00\xff" * 2).decode()}


async def test_the_memory_limit_of_a_call_counts(client: httpx.AsyncClient) -> None:
    code = "data = bytearray(200 << 20)\nprint(len(data))"

    enough = await client.post("/run_code", json={"code": code, "language": "python", "memory_limit_MB": 400})
    too_little = await client.post("/run_code", json={"code": code, "language": "python", "memory_limit_MB": 100})

    assert enough.json()["status"] == "Success"
    assert too_little.json()["status"] == "Failed"


async def test_output_that_is_not_text_does_not_break_the_answer(client: httpx.AsyncClient) -> None:
    code = "import sys; sys.stdout.buffer.write(b'a\\xffb')"
    reply = await client.post("/run_code", json={"code": code, "language": "python"})

    assert reply.json()["run_result"]["stdout"] == "a\ufffdb"


async def test_an_unknown_language_names_the_available_ones(client: httpx.AsyncClient) -> None:
    reply = await client.post("/run_code", json={"code": "", "language": "cobol"})

    assert reply.status_code == 422
    assert reply.json()["code"] == "invalid_request"
    assert "available: bash" in reply.json()["detail"]
    assert "python" in reply.json()["detail"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"files": {"../x": ""}},
        {"files": {"/etc/x": ""}},
        {"files": {"x": "not base64!"}},
        {"files": {"main.py": ""}},
        {"fetch_files": ["/etc/passwd"]},
        {"run_timeout": 0},
        {"run_timeout": 1e9},
        {"memory_limit_MB": -2},
        {"args": ["-v"]},
        {"allow_network": True},
    ],
)
async def test_a_bad_request_is_refused(client: httpx.AsyncClient, wrong: dict[str, Any]) -> None:
    reply = await client.post("/run_code", json={"code": "", "language": "python"} | wrong)

    assert reply.status_code == 422
    assert reply.headers["content-type"] == "application/problem+json"


async def test_a_full_queue_is_told_at_once_and_a_slow_one_at_its_deadline() -> None:
    sleeping = {"code": "import time; time.sleep(20)", "language": "python", "run_timeout": 6}

    async with a_client(concurrency=1, spare=0, max_queued=1, queue_seconds=2.5) as client:
        running = asyncio.create_task(client.post("/run_code", json=sleeping))
        while "flotilla_sandbox_running 1" not in (await client.get("/metrics")).text:
            await asyncio.sleep(0.01)
        waiting = asyncio.create_task(client.post("/run_code", json=sleeping))
        while "flotilla_sandbox_waiting 1" not in (await client.get("/metrics")).text:
            await asyncio.sleep(0.01)
        refused = await client.post("/run_code", json=sleeping)
        ready_for_others = await client.get("/readyz")
        other = asyncio.create_task(client.post("/run_code", json=sleeping, headers={EXPERIMENT_HEADER: "another"}))
        while "flotilla_sandbox_waiting 2" not in (await client.get("/metrics")).text:
            await asyncio.sleep(0.01)
        ready_when_full = await client.get("/readyz")
        late = await waiting
        await other
        done = await running
        ready_again = await client.get("/readyz")
        metrics = (await client.get("/metrics")).text

    assert (refused.status_code, refused.json()["code"]) == (503, "unavailable")
    assert (late.status_code, late.json()["code"]) == (504, "deadline_exceeded")
    assert done.json()["status"] == "Failed"
    assert [each.status_code for each in (ready_for_others, ready_when_full, ready_again)] == [200, 503, 200]
    assert 'flotilla_sandbox_refused_total{code="unavailable"} 1' in metrics
    assert 'flotilla_sandbox_runs_total{language="python",status="Failed"} 1' in metrics


async def test_health_tells_the_isolation_and_the_languages() -> None:
    async with a_client(level="C") as client:
        health = (await client.get("/healthz", headers={"Authorization": ""})).json()

    assert health["isolation"] == "C"
    assert health["languages"]["python"] == find_python(None)


async def test_health_and_log_tell_why_no_better_level_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")

    async with a_client() as client:
        health = (await client.get("/healthz")).json()

    assert health["isolation"] == "C"
    assert health["unavailable"] == {"A": "bwrap is not installed", "B": "bwrap is not installed"}
    assert [vars(record)["advice"] for record in caplog.records if record.message.startswith("isolation chosen")] == [
        "for level A install bubblewrap: apt install bubblewrap"
    ]


async def test_the_service_refuses_to_start_without_isolation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flotilla.services.sandbox.install.why_not", lambda level: None if level == "D" else "not here")
    settings = SandboxSettings.model_validate({"token": TOKEN, "concurrency": 1})

    with pytest.raises(
        Unavailable, match=r"FLOTILLA_UNSAFE_SANDBOX=1 for level D.*A: not here; B: not here; C: not here"
    ):
        async with open_state(settings):
            pass

    async with open_state(settings.model_copy(update={"unsafe_sandbox": True})) as state:
        assert state.executor.isolation.level == "D"


async def test_a_level_that_does_not_contain_the_self_test_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flotilla.services.sandbox.install.SELF_TEST", "print('reaches the network')")
    settings = SandboxSettings.model_validate({"token": TOKEN, "concurrency": 1, "level": "C"})

    with pytest.raises(Unavailable, match="was not contained: it reaches the network"):
        async with open_state(settings):
            pass


async def test_closing_leaves_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = f"flotilla-test-{os.getpid()}-"
    monkeypatch.setattr(trees, "PREFIX", prefix)

    async with a_client(level="C") as client:
        await client.post("/run_code", json={"code": "open('x', 'w').write('x')", "language": "python"})
        assert list(Path(tempfile.gettempdir()).glob(f"{prefix}*"))

    assert not list(Path(tempfile.gettempdir()).glob(f"{prefix}*"))


async def test_a_call_that_is_cancelled_ends_its_program() -> None:
    async with a_client(concurrency=1) as client:
        call = asyncio.create_task(
            client.post("/run_code", json={"code": "import time; time.sleep(60)", "language": "python"})
        )
        while "flotilla_sandbox_running 1" not in (await client.get("/metrics")).text:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)

        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

        after = await client.post("/run_code", json={"code": "print(1)", "language": "python"})
        assert json.loads(after.text)["status"] == "Success"
