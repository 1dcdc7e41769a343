"""Children that are killed: whatever they had ended with is what is told."""

import asyncio
import os
import sys

import pytest

from flotilla.shared.children.processes import kill, reap


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="the event loop waits in this way without being told")
async def test_a_child_that_had_ended_by_itself_keeps_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    # This one notices an end in the event loop, so not before the test lets it.
    watcher = asyncio.PidfdChildWatcher()
    watcher.attach_loop(asyncio.get_running_loop())
    monkeypatch.setattr(asyncio.get_event_loop_policy(), "get_child_watcher", lambda: watcher)
    child = await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", "raise SystemExit(7)")
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

    kill(child)

    assert await reap(child) == 7


async def test_a_child_that_lives_is_killed() -> None:
    child = await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", "import time; time.sleep(60)")

    kill(child)

    assert await reap(child) == -9
    kill(child)
