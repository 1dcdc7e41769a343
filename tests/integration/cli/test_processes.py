"""Owned processes: restarted when they die, given up when they refuse or keep dying, ended with all they started."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from flotilla.cli.log_rotation import older_logs
from flotilla.cli.processes import LogBounds, OwnedProcess, ProcessSpec, check_alive
from flotilla.shared.errors import WorkerDied

SLEEP = "import time; time.sleep(600)"


def owned(directory: Path, script: str, said: list[str], **options: bool) -> OwnedProcess:
    spec = ProcessSpec("worker", (sys.executable, "-c", script), dict(os.environ), **options)
    return OwnedProcess(spec, directory / "worker.log", said.append)


async def until(condition: Callable[[], object], seconds: float = 90) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_killed_process_is_started_again(tmp_path: Path) -> None:
    said: list[str] = []
    process = owned(tmp_path, SLEEP, said)
    await process.start()
    first = process.pid
    assert first is not None

    os.kill(first, signal.SIGKILL)

    await until(lambda: process.pid not in {None, first})
    assert "SIGKILL" in said[0]
    await process.stop()
    assert process.pid is None


async def test_the_log_of_a_process_that_writes_is_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flotilla.cli.processes.LOG_LOOK_SECONDS", 0.02)
    script = "import time\nfor n in range(10**9): print(n, flush=True); time.sleep(0.001)"
    spec = ProcessSpec("worker", (sys.executable, "-c", script), dict(os.environ))
    process = OwnedProcess(spec, tmp_path / "worker.log", lambda line: None, LogBounds(max_bytes=200, num_older=2))
    await process.start()

    await until(lambda: len(list(older_logs(process.log_path))) == 2)
    await process.stop()

    assert all(each.stat().st_size >= 200 for each in older_logs(process.log_path))


async def test_a_refusal_is_final_and_its_last_words_are_told(tmp_path: Path) -> None:
    said: list[str] = []
    process = owned(tmp_path, "import sys; sys.stderr.write('port 1 is in use\\n'); sys.exit(2)", said)
    await process.start()

    await until(lambda: process.gave_up)

    with pytest.raises(WorkerDied, match="port 1 is in use"):
        check_alive([process])
    await process.stop()


async def test_an_optional_process_may_be_given_up(tmp_path: Path) -> None:
    process = owned(tmp_path, "import sys; sys.exit(2)", [], is_optional=True)
    await process.start()
    await until(lambda: process.gave_up)

    check_alive([process])

    await process.stop()


async def test_a_process_that_keeps_dying_is_given_up(tmp_path: Path) -> None:
    process = owned(tmp_path, "raise SystemExit(1)", [])
    await process.start()

    await until(lambda: process.gave_up)

    assert process.restarts == 4
    await process.stop()


async def test_what_a_process_started_ends_with_it(tmp_path: Path) -> None:
    script = (
        f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}])\n"
        "print(child.pid, flush=True); child.wait()"
    )
    process = owned(tmp_path, script, [])
    await process.start()
    await until(lambda: process.log_path.read_text().strip())
    grandchild = int(process.log_path.read_text())

    await process.stop()

    await until(
        lambda: not psutil.pid_exists(grandchild) or psutil.Process(grandchild).status() == psutil.STATUS_ZOMBIE
    )


async def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flotilla.cli.processes.TERM_SECONDS", 0.2)
    script = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); {SLEEP}"
    process = owned(tmp_path, script, [])
    await process.start()
    await until(lambda: "up" in process.log_path.read_text())

    await process.stop()

    assert process.pid is None
