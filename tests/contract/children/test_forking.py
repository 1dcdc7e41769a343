"""What whoever forks children may rely on, whatever becomes of them."""

import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from flotilla.shared.children.calls import CallProcess
from flotilla.shared.children.processes import unheard
from tests.contract.children.test_calls import SECONDS, lives, until

COMMAND = [sys.executable, str(Path(__file__).with_name("forker.py"))]


@pytest.fixture
async def forker() -> AsyncIterator[CallProcess]:
    process = CallProcess(COMMAND, None, "the forker", on_line=unheard)
    await process.start()
    yield process
    await process.aclose()


@pytest.mark.parametrize(
    ("what", "cause"),
    [
        ("die", "ended with code 7; its last lines: the reason"),
        ("kill", "ended with code -9 (SIGKILL, "),
        ("stop", "ended with code -9 (SIGKILL)"),
        ("silent", "ended with code -9 (SIGKILL)"),
        ("flood", "ended with code 0; its last lines: xxx"),
        ("half", "ended with code 0"),
        ("raise", "ended with code 1; its last lines: "),
        ("return", "ended with code 1"),
    ],
)
async def test_whole_lines_are_heard_and_the_end_is_explained(forker: CallProcess, what: str, cause: str) -> None:
    lines, found = await forker.call(what, seconds=SECONDS)

    assert lines == ["first", "second"]
    assert found.startswith(cause)
    assert len(found) < 2000
    assert ("KeyError: 'x'" in found) is (what == "raise")


async def test_children_hear_what_they_are_told_and_keep_nothing_of_the_parent_open(forker: CallProcess) -> None:
    await forker.call("silent and leave", seconds=SECONDS)

    assert (await forker.call("hear", seconds=SECONDS))[0] == ["first", "second", "heard"]
    assert (await forker.call("descriptors", seconds=SECONDS))[0] == ["first", "second", "4"]


@pytest.mark.parametrize("what", ["silent and leave", "stop and leave"])
async def test_children_end_with_who_forked_them(forker: CallProcess, what: str) -> None:
    pid = await forker.call(what, seconds=SECONDS)
    assert forker.child is not None and lives(pid)

    os.kill(forker.child.process.pid, signal.SIGKILL)

    await until(lambda: not lives(pid))
