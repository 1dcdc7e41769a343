"""What may succeed on trying again is absence, wherever code or files of a spec are opened."""

import asyncio
import errno
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from flotilla.services.gateway.datasets.locations import open_bytes
from flotilla.services.reward.verifiers.custom_process import CustomProcessVerifier
from flotilla.services.reward.verifiers.reward_model import RewardModelVerifier
from flotilla.services.rollout.custom.process import CustomProcess
from flotilla.services.rollout.engines.decoders.checkpoint import read_config
from flotilla.services.rollout.tools.opening import HttpTool
from flotilla.shared.children import calls
from flotilla.shared.config.sections.episodes import EnvironmentConfig
from flotilla.shared.config.sections.judge import RewardModelConfig
from flotilla.shared.config.sections.reward import CustomConfig
from flotilla.shared.errors import DeadlineExceeded, EpisodeFailed, FlotillaError, InvalidSpec, ModelError, Unavailable
from flotilla.shared.net.absence import absent_or, may_pass


class OutOfMemoryError(RuntimeError):
    """What torch raises where a GPU has no room now."""


def raised_from(cause: Exception) -> Exception:
    error = ValueError("cannot be read")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (OSError(errno.ENOSPC, "no space"), True),
        (OSError(errno.EMFILE, "too many files"), True),
        (TimeoutError(), True),
        (ConnectionRefusedError(), True),
        (MemoryError(), True),
        (subprocess.TimeoutExpired("x", 1), True),
        (socket.gaierror(socket.EAI_AGAIN, "later"), True),
        (OutOfMemoryError("CUDA"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
        (raised_from(ConnectionResetError()), True),
        (ExceptionGroup("session", [ConnectionRefusedError()]), True),
        (Unavailable("x"), True),
        (socket.gaierror(socket.EAI_NONAME, "no such host"), False),
        (FileNotFoundError(errno.ENOENT, "x"), False),
        (PermissionError(errno.EACCES, "x"), False),
        (OSError("no tokenizer"), False),
        (raised_from(KeyError("x")), False),
        (raised_from(httpx.ConnectError("no address")), True),
        (ExceptionGroup("session", [httpx.ConnectError("x"), PermissionError("not allowed")]), False),
        (InvalidSpec("x"), False),
    ],
)
def test_an_error_passes_or_stays(error: Exception, passes: bool) -> None:
    found = absent_or(error, ModelError("it cannot be loaded"))

    assert may_pass(error) is passes
    assert isinstance(found, Unavailable if passes else ModelError)
    assert found.detail == "it cannot be loaded"


@pytest.mark.parametrize(("status", "passes"), [(503, True), (429, True), (500, False), (404, False)])
def test_a_busy_server_is_absent_and_one_that_refuses_is_not(status: int, passes: bool) -> None:
    request = httpx.Request("GET", "http://example.org")
    error = httpx.HTTPStatusError("x", request=request, response=httpx.Response(status))

    assert may_pass(error) is passes


ABSENT = "raise ConnectionError('the data base does not answer')"


@pytest.mark.parametrize(("line", "kind"), [(ABSENT, Unavailable), ("raise KeyError('x')", InvalidSpec)])
async def test_code_that_needs_what_is_absent_is_waited_for(tmp_path: Path, line: str, kind: type[Exception]) -> None:
    (tmp_path / "own.py").write_text(f"{line}\n")
    verifier = CustomProcessVerifier(CustomConfig(path=f"{tmp_path}/own.py:score"), None)
    process = CustomProcess([EnvironmentConfig(environment=f"{tmp_path}/own.py:Env")])

    for each in (verifier.start, process.start):
        with pytest.raises(kind):
            await each()
    with pytest.raises(Unavailable if kind is Unavailable else EpisodeFailed):
        await process.restart()


async def test_an_environment_whose_server_is_absent_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"class Env:\n    def __init__(self):\n        {ABSENT}\n")
    process = CustomProcess([EnvironmentConfig(environment=f"{tmp_path}/own.py:Env")])

    with pytest.raises(Unavailable, match="does not answer"):
        await process.start()


async def test_code_that_is_slow_to_load_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "START_SECONDS", 0.05)
    (tmp_path / "own.py").write_text("import time; time.sleep(60)\n")
    verifier = CustomProcessVerifier(CustomConfig(path=f"{tmp_path}/own.py:score"), None)

    with pytest.raises(DeadlineExceeded, match="not loaded within"):
        await verifier.start()


async def test_no_room_for_a_process_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "too many processes")

    monkeypatch.setattr(asyncio.get_running_loop(), "subprocess_exec", full)
    verifier = CustomProcessVerifier(CustomConfig(path=f"{tmp_path}/own.py:score"), None)
    model = RewardModelVerifier(RewardModelConfig(kind="reward_model", path=str(tmp_path)), tmp_path)

    for start in (verifier.start, model.start):
        with pytest.raises(Unavailable, match="too many processes"):
            await start()


@pytest.mark.parametrize(
    ("program", "kind"),
    [
        ("import os; os.kill(os.getpid(), 9)", Unavailable),
        ("import time; time.sleep(60)", Unavailable),
        (
            'print(\'"serving"\\n{"error": ["unavailable", "disk", [], {}]}\', flush=True); input(); input()',
            Unavailable,
        ),
        (
            'print(\'"serving"\\n{"error": ["invalid_spec", "no model", [], {}]}\', flush=True); input(); input()',
            InvalidSpec,
        ),
    ],
)
async def test_a_reward_model_whose_start_may_succeed_later_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, kind: type[FlotillaError]
) -> None:
    seconds = 0.05 if "sleep" in program else 20.0
    monkeypatch.setattr("flotilla.services.reward.verifiers.reward_model.START_SECONDS", seconds)
    config = RewardModelConfig(kind="reward_model", path=str(tmp_path))
    model = RewardModelVerifier(config, tmp_path, command=(sys.executable, "-c", program))

    with pytest.raises(kind):
        await model.start()
    assert model.pid is None


def test_files_that_cannot_be_opened_now_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(Path, "open", full)
    monkeypatch.setattr(Path, "read_text", full)
    with pytest.raises(Unavailable, match="too many open files"):
        open_bytes(f"{tmp_path}/rows.jsonl", None)
    with pytest.raises(Unavailable, match="too many open files"):
        read_config(tmp_path)


@pytest.mark.parametrize(("status", "kind"), [(503, Unavailable), (500, EpisodeFailed), (None, Unavailable)])
async def test_a_tool_that_is_absent_is_waited_for_and_one_that_fails_is_not(
    status: int | None, kind: type[Exception]
) -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        if status is None:
            raise httpx.ConnectError("refused") from ConnectionRefusedError()
        return httpx.Response(status)

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        tool = HttpTool("http://tools.example.org/add", {"function": {"name": "add"}}, client)
        with pytest.raises(kind, match="cannot be used"):
            await tool.call({})
