"""What whoever keeps a program of others may rely on: nothing of it outlives its owner, whoever is killed and when."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import psutil
import pytest

from flotilla.shared.children.keeper import CANNOT_START
from flotilla.shared.children.processes import Kept
from tests.contract.children.test_calls import SECONDS, lives, until

# It tells its child's number, which is in a session of its own, then does something.
PROGRAM = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("child", child.pid, flush=True)
what = sys.argv[1]
if what == "die":
    print("the reason", file=sys.stderr, flush=True)
    os._exit(7)
if what == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if what == "stop":
    os.kill(os.getpid(), signal.SIGSTOP)
if what == "flood":
    for number in (1, 2) * 100:
        os.write(number, b"x" * 65536)
    os.write(1, b"\\nlast\\nhalf a line")
    os._exit(0)
if what == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready", flush=True)
time.sleep(600)
"""


class Lines(list[str]):
    """What it wrote."""

    @property
    def child(self) -> int:
        return int(self[0].removeprefix("child "))


@asynccontextmanager
async def kept(what: str, lines: Lines, directory: Path, *, seconds: float = 0.2) -> AsyncIterator[Kept]:
    program = await Kept.start(
        [sys.executable, "-c", PROGRAM, what],
        environment=dict(os.environ),
        directory=directory,
        on_line=lines.append,
        seconds=seconds,
    )
    try:
        await until(lambda: lines)
        yield program
    finally:
        await program.close(seconds)


def first_of(program: Kept) -> psutil.Process:
    """The program itself, which is the keeper's first child."""
    return psutil.Process(program.pid).children()[0]


@pytest.mark.parametrize(("what", "code", "last"), [("die", 7, "the reason"), ("kill", -9, None), ("flood", 0, "last")])
async def test_one_that_ends_takes_its_children_along_and_its_end_is_known(
    tmp_path: Path, what: str, code: int, last: str | None
) -> None:
    lines = Lines()
    async with kept(what, lines, tmp_path) as program, asyncio.timeout(SECONDS):
        assert await program.ended() == code
        assert program.has_ended
        assert not lives(lines.child)

    assert lines[-1] == (last or lines[0])


@pytest.mark.parametrize("what", ["silent", "stop", "stubborn"])
async def test_one_that_does_not_end_is_ended_with_its_children(tmp_path: Path, what: str) -> None:
    lines = Lines()
    async with kept(what, lines, tmp_path) as program:
        await until(lambda: what != "stubborn" or "ready" in lines)
        first = first_of(program).pid

    assert program.has_ended
    await until(lambda: not lives(first) and not lives(lines.child))


async def test_where_its_keeper_is_killed_closing_ends_what_is_left_of_its_session(tmp_path: Path) -> None:
    lines = Lines()
    async with kept("silent", lines, tmp_path) as program:
        first = first_of(program).pid
        os.kill(program.pid, signal.SIGKILL)
        assert await program.ended() == -signal.SIGKILL

    await until(lambda: not lives(first))
    os.kill(lines.child, signal.SIGKILL)  # it left the session, and lost the only one that knew it


LEADER = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
if sys.argv[1] == "lives":
    child.wait()
"""


class Ended:
    """A process that has ended, and whose number another one has now."""

    returncode = 0

    def __init__(self, pid: int) -> None:
        self.pid = pid

    async def wait(self) -> int:
        return self.returncode


@pytest.mark.parametrize("leader", ["lives", "has ended"])
async def test_a_group_of_others_that_has_the_number_now_is_left_alone(leader: str) -> None:
    ended = Ended(0)
    program = Kept(cast(asyncio.subprocess.Process, ended), -1, asyncio.create_task(asyncio.sleep(0.05)))
    assert await program.ended() == 0
    other = subprocess.Popen(
        [sys.executable, "-c", LEADER, leader], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    ended.pid = other.pid
    assert other.stdout is not None
    child = int(await asyncio.to_thread(other.stdout.readline))
    if leader == "has ended":
        other.wait()
    try:
        await program.close(0.1)

        await asyncio.sleep(0.1)
        assert lives(child)
    finally:
        os.kill(child, signal.SIGKILL)
        other.wait()
        other.stdout.close()


async def test_a_program_that_is_not_there_is_said(tmp_path: Path) -> None:
    lines = Lines()
    command, environment = ["/no/such/program"], dict(os.environ)
    program = await Kept.start(command, environment=environment, directory=tmp_path, on_line=lines.append, seconds=0.1)

    assert await program.ended() == CANNOT_START
    assert lines == ["No such file or directory"]
    await program.close(0.1)


OWNER = """
import asyncio, sys
from pathlib import Path
from tests.contract.children.test_kept import Lines, first_of, kept
async def main():
    lines = Lines()
    async with kept(sys.argv[1], lines, Path("/")) as program:
        print(program.pid, first_of(program).pid, lines.child, flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.parametrize("what", ["silent", "stop", "stubborn"])
async def test_all_of_it_ends_with_its_owner(what: str) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, what], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pids = [int(each) for each in (await asyncio.to_thread(owner.stdout.readline)).split()]
    assert len(pids) == 3 and all(map(lives, pids))

    owner.kill()
    owner.wait()

    await until(lambda: not any(map(lives, pids)))
    owner.stdout.close()
