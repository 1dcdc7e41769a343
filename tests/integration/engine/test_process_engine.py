"""The engine's process: how it starts, fails, dies and is told about."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from flotilla.services.rollout.engines.process.engine import ProcessEngine
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.shared.errors import DeadlineExceeded, ModelError, WorkerDied
from tests.contract.engine.requests import a_request
from tests.integration.engine.conftest import SavedModel

Saved = Callable[[str], SavedModel]
ROOT = Path(__file__).parents[3]


def settings(path: Path | str, **changes: object) -> EngineSettings:
    return EngineSettings(str(path), **{"slots": 4, "context_tokens": 128, **changes})  # type: ignore[arg-type]


def is_gone(process_id: int) -> bool:
    return not psutil.pid_exists(process_id) or psutil.Process(process_id).status() == psutil.STATUS_ZOMBIE


async def test_a_killed_worker_is_named_to_every_caller(saved: Saved) -> None:
    engine = ProcessEngine(settings(saved("qwen3").path))
    await engine.start()
    calls = [asyncio.create_task(engine.generate(a_request(max_new_tokens=120))) for _ in range(6)]
    await asyncio.sleep(0)
    assert engine.process_id is not None

    os.kill(engine.process_id, signal.SIGKILL)

    for result in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(result, WorkerDied)
        assert "ended with code -9 (SIGKILL" in result.detail
        assert "engine loaded" in result.detail
    with pytest.raises(WorkerDied, match="SIGKILL"):
        await engine.generate(a_request())
    with pytest.raises(WorkerDied, match="SIGKILL"):
        await engine.load()
    await engine.close()


async def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    engine = ProcessEngine(settings(tmp_path / "nowhere"))

    with pytest.raises(ModelError, match=r"directory .*nowhere does not exist"):
        await engine.start()

    assert engine.process_id is None
    await engine.close()


async def test_a_worker_that_ends_while_it_loads_says_why(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "no number")

    with pytest.raises(WorkerDied, match="PYTHONHASHSEED"):
        await ProcessEngine(settings(saved("qwen3").path)).start()


async def test_starting_has_a_deadline(saved: Saved) -> None:
    engine = ProcessEngine(settings(saved("qwen3").path, start_seconds=0.05))

    with pytest.raises(DeadlineExceeded, match=r"within 0\.05 s"):
        await engine.start()

    assert engine.process_id is None


async def test_cancelling_a_start_leaves_no_process(saved: Saved) -> None:
    engine = ProcessEngine(settings(saved("qwen3").path))
    starting = asyncio.create_task(engine.start())
    async with asyncio.timeout(60):
        while engine.process_id is None:
            await asyncio.sleep(0.001)
    process_id = engine.process_id

    starting.cancel()

    with pytest.raises(asyncio.CancelledError):
        await starting
    assert is_gone(process_id)


async def test_a_worker_that_does_not_answer_is_killed_at_close(saved: Saved) -> None:
    engine = ProcessEngine(settings(saved("qwen3").path, close_seconds=0.2, call_seconds=0.1))
    await engine.start()
    process_id = engine.process_id
    assert process_id is not None
    os.kill(process_id, signal.SIGSTOP)
    waiting = asyncio.create_task(engine.generate(a_request()))
    await asyncio.sleep(0)

    await engine.close()

    assert is_gone(process_id)
    with pytest.raises(WorkerDied):
        await waiting


async def test_the_threads_are_those_of_the_settings(saved: Saved) -> None:
    engine = ProcessEngine(settings(saved("qwen3").path, threads=1))
    await engine.start()

    environment = psutil.Process(engine.process_id).environ()

    assert (environment["OMP_NUM_THREADS"], environment["OMP_WAIT_POLICY"]) == ("1", "PASSIVE")
    await engine.close()


async def test_a_worker_that_writes_a_lot_is_not_blocked(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nprint('x' * 300_000, flush=True)\nprint('lines\\n' * 50_000, file=sys.stderr)"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    engine = ProcessEngine(settings(saved("qwen3").path))

    await engine.start()

    assert len(await engine.generate(a_request())) == 1
    await engine.close()


PARENT = """
import asyncio, sys
from flotilla.services.rollout.engines.process.engine import ProcessEngine
from flotilla.services.rollout.engines.settings import EngineSettings

async def main():
    engine = ProcessEngine(EngineSettings(sys.argv[1], slots=4, context_tokens=128))
    await engine.start()
    heavy = sorted({"torch", "transformers", "safetensors"} & sys.modules.keys())
    print(engine.process_id, heavy, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_the_worker_dies_with_its_parent_which_never_imports_torch(saved: Saved) -> None:
    command = [sys.executable, "-c", PARENT, str(saved("qwen3").path)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert parent.stdout is not None
        process_id, imported = parent.stdout.readline().split(maxsplit=1)
        assert imported.strip() == "[]"
        assert not is_gone(int(process_id))
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()

    deadline = time.monotonic() + 60
    while not is_gone(int(process_id)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_gone(int(process_id))
