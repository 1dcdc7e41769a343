"""A server that does not start ends with what was wrong and what to do, within its deadline, and leaves nothing behind.

Shell scripts take the place of interpreters.
"""

import sys
import time
from pathlib import Path

import psutil
import pytest

from flotilla.services.rollout.engines.servers.engine import ServerEngine
from flotilla.services.rollout.engines.servers.settings import ServerSettings
from flotilla.services.rollout.engines.sglang.engine import SglangEngine
from flotilla.services.rollout.engines.vllm.engine import VllmEngine
from flotilla.shared.errors import FlotillaError, InvalidSpec, WorkerDied
from tests.contract.engine.models import save_model
from tests.contract.engine.requests import a_request

ENDS_WHEN_ASKED = """
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        print({last!r}, flush=True)
        os._exit({code})

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Answers).serve_forever()
"""
KINDS = {"sglang": SglangEngine, "vllm": VllmEngine}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model("qwen3", path)
    return path


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def an_engine(kind: str, model: Path, directory: Path, script: str, seconds: float = 20.0) -> ServerEngine:
    program = directory / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    made: ServerEngine = KINDS[kind](ServerSettings(model, python=program, start_seconds=seconds, close_seconds=0.5))
    return made


async def failure_of(engine: ServerEngine) -> FlotillaError:
    """Start it, and check that nothing of it is left."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with pytest.raises(FlotillaError) as caught:
        await engine.start()
    left = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
    assert left == []
    assert not engine._place.exists()
    await engine.close()
    return caught.value


async def test_an_environment_without_the_engine_is_named_with_the_way_out(
    kind: str, model: Path, tmp_path: Path
) -> None:
    finding = f"Error while finding module specification for '{kind}.x' (ModuleNotFoundError: No module named '{kind}')"

    error = await failure_of(an_engine(kind, model, tmp_path, f'echo "$0: {finding}" >&2; exit 1'))

    assert isinstance(error, InvalidSpec)
    assert f"FLOTILLA_{kind.upper()}_PYTHON {tmp_path}/python cannot run" in error.detail
    assert f"it has no module {kind}: set it to the interpreter of an environment" in error.detail


async def test_a_server_that_hangs_is_ended_at_its_deadline_with_what_it_said(model: Path, tmp_path: Path) -> None:
    started = time.monotonic()

    error = await failure_of(an_engine("vllm", model, tmp_path, "echo loading shard 3; sleep 1000 & wait", seconds=1.0))

    # As a death, which is tried again only so often: a start that is tried without an end would hang the experiment.
    assert isinstance(error, WorkerDied)
    assert error.detail.endswith("within 1 s (rollout.engine.start_seconds); last lines: loading shard 3")
    assert time.monotonic() - started < 20


async def test_an_interpreter_that_may_not_be_executed_is_named(kind: str, model: Path, tmp_path: Path) -> None:
    engine = an_engine(kind, model, tmp_path, "exit 0")
    (tmp_path / "python").chmod(0o600)

    error = await failure_of(engine)

    assert f"{tmp_path}/python cannot be started: Permission denied" in error.detail


@pytest.mark.parametrize(
    ("last", "code"), [("ModuleNotFoundError: No module named 'flashinfer'", 1), ("error: no such graph", 2)]
)
async def test_a_server_that_was_up_dies_whatever_it_says_so_its_tasks_go_elsewhere(
    model: Path, tmp_path: Path, last: str, code: int
) -> None:
    (tmp_path / "server.py").write_text(ENDS_WHEN_ASKED.format(last=last, code=code))
    script = f'exec {sys.executable} {tmp_path}/server.py "$@"'
    engine = an_engine("sglang", model, tmp_path, script, seconds=60.0)
    await engine.start()

    with pytest.raises(WorkerDied, match=r"(?i)flashinfer|no such graph"):
        await engine.generate(a_request(max_new_tokens=1))

    with pytest.raises(WorkerDied):
        await engine.load()
    await engine.close()
