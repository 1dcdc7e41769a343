"""``flotilla up --detach`` says how to end what it has started, and leaves nothing half started behind."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from flotilla.cli.command_line import build_parser
from flotilla.cli.commands import fleet
from flotilla.connection import FLEET_FILE
from flotilla.shared.children.processes import kill, reap

STARTING = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
Path(sys.argv[1]).touch()
time.sleep(60)
"""
UP = """
import json, os, sys, time
from pathlib import Path
content = {"pid": os.getpid(), "gateway_url": "http://127.0.0.1:1", "token": "t", "redis_url": "r"}
partial = Path(sys.argv[1] + ".partial")
partial.write_text(json.dumps(content))
partial.rename(sys.argv[1])
time.sleep(60)
"""


def detach(monkeypatch: pytest.MonkeyPatch, program: str, file: Path, data: Path) -> asyncio.Task[int]:
    """Type ``up --detach`` where this program stands for the fleet."""
    monkeypatch.setattr(fleet, "python_module", lambda *_: [sys.executable, "-c", program, str(file)])
    arguments = build_parser().parse_args(["up", "--detach", "--data", str(data)])
    return asyncio.create_task(fleet.up(arguments))


async def test_ctrl_c_while_it_comes_up_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "started"
    starting = detach(monkeypatch, STARTING, mark, tmp_path / "fleet")
    async with asyncio.timeout(60):
        while not mark.exists():
            await asyncio.sleep(0.01)
    (child,) = [each for each in psutil.Process().children() if str(mark) in each.cmdline()]

    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting

    assert not psutil.pid_exists(child.pid)


async def test_it_names_the_command_that_ends_this_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "my fleet"
    data.mkdir()

    started: list[asyncio.subprocess.Process] = []
    start = asyncio.create_subprocess_exec

    async def noted(*words: Any, **how: Any) -> asyncio.subprocess.Process:
        started.append(await start(*words, **how))
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)

    code = await detach(monkeypatch, UP, data / FLEET_FILE, data)

    (child,) = started
    kill(child)
    assert await reap(child) == -9
    assert code == 0
    said = capsys.readouterr().out
    assert f"`flotilla down --data '{data}'` ends it" in said
    assert said.startswith(f"a fleet starts; its log is {data / 'logs' / 'fleet.log'}\n")
