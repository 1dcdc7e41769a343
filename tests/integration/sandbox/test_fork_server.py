"""Programs run in forks of a warm interpreter: they cannot tell, and leave nothing in it."""

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from flotilla.services.sandbox import fork_servers
from flotilla.services.sandbox.guard.job import NOT_STARTED
from flotilla.services.sandbox.guard.watch import descendants
from flotilla.services.sandbox.languages import find_python, python_command
from flotilla.services.sandbox.routes.run_code import make_program
from flotilla.services.sandbox.state import SandboxState
from flotilla.shared.schemas.sandbox import IsolationLevel, RunCodeRequest, RunStatus
from tests.integration.sandbox.poison import CHECK, POISONS
from tests.integration.sandbox.running import a_sandbox, run

LIKE_PYTHON = {
    "an exception": "def f():\n    raise ValueError('x')\n\nf()",
    "an exception of an exception": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('y') from e",
    "a group": "raise ExceptionGroup('g', [ValueError(1), TypeError(2)])",
    "bad syntax": "x = = 1",
    "bad indentation": "if True:\nx = 1",
    "an encoding": "# -*- coding: latin-1 -*-\nprint(len('\u00e9'))",
    "exit with a number": "import sys; print('a'); sys.exit(300)",
    "exit with a text": "import sys; print('a'); sys.exit('b')",
    **{
        f"exit with {code}": f"import sys; print('a'); sys.exit({code})"
        for code in (
            "2**70",
            "-(2**70)",
            "2**63 - 1",
            "2**63",
            "-1",
            "-2",
            "-9",
            "256",
            "2**32 + 1",
            "True",
            "''",
            "1.5",
        )
    },
    "exit with a number after a package": "import sys, email.mime.text; sys.exit(2**70)",
    "exit with nothing": "raise SystemExit",
    "an interrupt": "raise KeyboardInterrupt",
    "a signal": "import os; os.kill(os.getpid(), 15)",
    "a hook": "import sys\ndef hook(*a): print('hook', a[0])\nsys.excepthook = hook\n1 / 0",
    "a broken hook": "import sys\nsys.excepthook = None\n1 / 0",
    "no end of line": "import sys; sys.stdout.write('a'); sys.stderr.write('b')",
    "an unclosed file": "f = open('left', 'w'); f.write('x' * 100)\nimport atexit\natexit.register(print, 'end')",
    "a file in a cycle": "class A: pass\na = A(); a.a = a; a.f = open('left', 'w'); a.f.write('y'); del a",
    "destructors": "class A:\n    def __del__(self): print('gone', __name__)\na = A(); _b = A()",
    "threads": "import threading as t, time\nt.Thread(target=lambda: (time.sleep(0.1), print(1))).start()\nprint('m')",
    "a daemon thread": "import threading as t, time\nt.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "an exception in a thread": "import threading\nt = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()",
    "exit functions": "import atexit\natexit.register(print, 'second')\natexit.register(print, 'first')",
    "who it is": "import sys\nprint(__name__, __file__, sys.argv, sys.path[0], __spec__, __doc__, __builtins__)",
    "what it has": "print(sorted(n for n in dir()), __annotations__, type(__loader__).__name__)",
    "modules": "import sys; print(sorted(set(sys.modules) - {'sitecustomize'}))",
    "flags": "import sys; print(sys.flags, sys.orig_argv[1:], sys.stdin.encoding, sys.stdout.line_buffering)",
    "streams": "import sys; print(sys.stdin.readline(), sys.stdin.buffer.read(), sys.stdout.seekable())",
    "no input": "print(input()); print(input()); print(input())",
    "a helper": "import helper, inspect; print(helper.N, inspect.getsource(helper))",
    "a name of the standard library": "import json; print(json.N)",
    "itself": "import __main__, sys; x = 1; print(__main__.x, sys.modules['__main__'] is __main__)",
    "forks": "import os\nif os.fork() == 0:\n    print('child')\nelse:\n    os.wait(); print('parent')",
    "multiprocessing": "import multiprocessing as m\nm.get_context('fork').Process(target=print, args=('p',)).start()",
    "ctypes": "import ctypes; ctypes.CDLL(None).printf(b'from C\\n'); print(ctypes.sizeof(ctypes.c_long))",
    "closed output": "import sys; print('a'); sys.stdout.close()",
    "enumerations": "import enum, signal\nclass A(enum.Enum): X = 1\nprint(A.X, signal.SIGINT, signal.getsignal(2))",
    "annotations": "x: int = 1\nprint(__annotations__)",
    "a future": "from __future__ import annotations\nx: nonsense = 1\nprint(__annotations__)",
    "recursion": "def f(n): return f(n + 1)\ntry:\n    f(0)\nexcept RecursionError: print('deep')",
    "exec in main": "exec('y = 2'); print(y, eval('y'))",
    "data classes": "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\nprint(P(1))",
    "another program": "import os; os.execv('/bin/sh', ['sh', '-c', 'echo from a shell; exit 7'])",
    "another program that is killed": "import os; os.execv('/bin/sh', ['sh', '-c', 'kill -9 $$'])",
    "pickles": "import pickle\nclass P: pass\nprint(type(pickle.loads(pickle.dumps(P()))).__name__)",
}
SEARCH = """
first, second = b"a needle from an", b" earlier program"
kept = [first + second] if input() == "control" else []
found = 0
for line in open("/proc/self/maps"):
    place, rights = line.split()[:2]
    start, end = (int(number, 16) for number in place.split("-"))
    if rights.startswith("r") and end < 1 << 47:
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            try:
                memory.seek(start)
                for piece in memory.read(end - start).split(first)[1:]:
                    found += piece.startswith(second)
            except (OSError, ValueError):
                continue
print(found)
"""
"""Looks for both pieces beside each other in all memory of its process."""
GIVEN = {"helper.py": "TiA9IDIK", "json.py": "TiA9IDMK"}
INPUT = "first\nsecond\n"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=["A", "B", "C"])
async def one_slot(request: pytest.FixtureRequest) -> AsyncIterator[SandboxState]:
    async with a_sandbox(request.param, concurrency=1) as opened:
        yield opened


async def test_no_program_changes_what_the_next_one_finds(one_slot: SandboxState) -> None:
    before = await _state(one_slot)

    for name, code in POISONS.items():
        answer = await run(one_slot, code, run_timeout=5)
        assert answer.status is not RunStatus.SANDBOX_ERROR, (name, answer)
        assert answer.run_result is not None
        assert answer.run_result.return_code != 77, (name, answer)
        assert "SyntaxError" not in (answer.run_result.stderr or ""), (name, answer)
        assert await _state(one_slot) == before, name

    assert (one_slot.executor.num_servers_lost, one_slot.executor.num_spoiled) == (0, 0)


async def _state(sandbox: SandboxState) -> object:
    answer = await run(sandbox, CHECK)
    assert answer.status is RunStatus.SUCCESS, answer
    assert answer.run_result is not None
    return json.loads(answer.run_result.stdout or "")


async def test_a_fork_does_what_python_does(one_slot: SandboxState) -> None:
    work = one_slot.executor.isolation.work_directory(one_slot.pool.slots[0])

    different = {}
    for name, code in LIKE_PYTHON.items():
        expected = await asyncio.to_thread(_by_python, code, work)
        answer = await run(one_slot, code, stdin=INPUT, files=GIVEN, fetch_files=("left",))
        got = answer.run_result
        assert got is not None, name
        found = (got.return_code, got.stdout, got.stderr, answer.files.get("left"))
        if found != expected:
            different[name] = {"expected": expected, "found": found}

    assert different == {}


def _by_python(code: str, work: str) -> tuple[int, str, str, str | None]:
    """Run a program by Python itself; paths in what it prints are those of the sandbox."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name).resolve()
        (directory / "main.py").write_text(code)
        (directory / "helper.py").write_text("N = 2\n")
        (directory / "json.py").write_text("N = 3\n")
        environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": name}
        command = python_command(find_python(None))
        done = subprocess.run(
            command, cwd=directory, input=INPUT.encode(), capture_output=True, timeout=60, env=environment
        )
        left = directory / "left"
        streams = [stream.decode().replace(str(directory), work) for stream in (done.stdout, done.stderr)]
        content = (
            subprocess.run(["base64", "-w0", str(left)], capture_output=True).stdout.decode() if left.exists() else None
        )
        return done.returncode, streams[0], streams[1], content


async def test_nothing_of_a_program_is_in_the_memory_of_the_next(one_slot: SandboxState) -> None:
    if one_slot.executor.isolation.level is IsolationLevel.C:
        pytest.skip("there is no /proc by which a program could read all of its memory")
    needle = "a needle from an earlier program"
    earlier = f"import sys; print(sys.stdin.read()); open('left', 'w').write('{needle}' * 9); sys.exit('{needle}')"
    for _ in range(3):
        await run(one_slot, earlier, stdin=needle * 1000, files={"x": "YSBuZWVkbGU="}, fetch_files=("left",))

    after, control = [await run(one_slot, SEARCH, stdin=given) for given in ("nothing", "control")]

    assert after.run_result is not None and control.run_result is not None
    assert after.run_result.stdout == "0\n", after
    assert int(control.run_result.stdout or "") > 0


async def test_no_place_is_made_beside_a_program(one_slot: SandboxState) -> None:
    await run(one_slot, "")
    (server,) = one_slot.executor.servers()
    outside = 0 if one_slot.executor.isolation.level is IsolationLevel.C else 2
    running = asyncio.create_task(run(one_slot, "import time; time.sleep(0.5)"))
    most = 0

    while not running.done():
        most = max(most, len(descendants(server.process.pid)))
        await asyncio.sleep(0.01)

    # The guard and the program; with namespaces also the server, below bwrap's first process, and the run's first one.
    assert most == 2 + (outside + 1 if outside else 0)
    assert running.result().status is RunStatus.SUCCESS


async def test_a_program_that_cannot_be_confined_is_not_started(one_slot: SandboxState) -> None:
    request = RunCodeRequest(code="print('fine')", language="python")

    async with one_slot.pool.taken() as slot:
        directory = one_slot.executor.isolation.work_directory(slot)
        program = make_program(request, one_slot.languages["python"], directory, one_slot)
        limits = dataclasses.replace(program.limits, open_files=3)
        result = await one_slot.executor.run(slot, dataclasses.replace(program, limits=limits))
    await one_slot.pool.settled()

    assert (result.phases[0].outcome, result.phases[0].return_code) == (NOT_STARTED, None)
    assert "Too many open files" in result.phases[0].detail


@pytest.mark.parametrize("level", ["A", "B"])
async def test_orphans_that_end_do_not_count_as_processes(level: str) -> None:
    orphan = "    if os.fork() == 0:\n        os.fork()\n        os._exit(0)\n    os.wait()\n"

    async with a_sandbox(level, concurrency=1) as state:
        answer = await run(state, f"import os\nfor _ in range(150):\n{orphan}print(1)")

    assert answer.status is RunStatus.SUCCESS, answer


async def test_an_answer_does_not_wait_until_all_of_its_program_is_gone(
    one_slot: SandboxState, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run(one_slot, "")
    is_gone, done = asyncio.Event(), fork_servers.ForkServer.done

    async def later(server: fork_servers.ForkServer) -> None:
        await is_gone.wait()
        await done(server)

    monkeypatch.setattr(fork_servers.ForkServer, "done", later)
    request = RunCodeRequest(code="print('fine')", language="python")

    async with asyncio.timeout(30), one_slot.pool.taken() as slot:
        directory = one_slot.executor.isolation.work_directory(slot)
        program = make_program(request, one_slot.languages["python"], directory, one_slot)
        result = await one_slot.executor.run(slot, program)

    assert result.phases[0].output() == ("fine\n", "")
    assert one_slot.pool.num_running == 1  # another program would find what is left of it
    is_gone.set()
    await one_slot.pool.settled()
    assert one_slot.pool.num_running == 0


async def test_a_server_that_ends_is_replaced_and_its_program_runs_again(one_slot: SandboxState) -> None:
    lost = one_slot.executor.num_servers_lost
    await run(one_slot, "print('warm')")
    (server,) = one_slot.executor.servers()
    running = asyncio.create_task(run(one_slot, "import time; time.sleep(0.5); print('fine')"))
    while server.num_runs < 2 and not running.done():
        await asyncio.sleep(0.01)

    os.kill(server.process.pid, signal.SIGKILL)

    answer = await running
    assert answer.run_result is not None and answer.run_result.stdout == "fine\n"
    assert one_slot.executor.num_servers_lost == lost + 1
    assert (await run(one_slot, "print('again')")).status is RunStatus.SUCCESS


async def test_a_server_is_replaced_after_so_many_runs(one_slot: SandboxState, monkeypatch: pytest.MonkeyPatch) -> None:
    await run(one_slot, "")
    (first,) = one_slot.executor.servers()
    monkeypatch.setattr(fork_servers, "MAX_RUNS", first.num_runs)

    answer = await run(one_slot, "print('fine')")

    (second,) = one_slot.executor.servers()
    assert answer.status is RunStatus.SUCCESS
    assert second is not first
    assert first.process.returncode is not None


async def test_a_server_does_not_grow_with_what_it_runs(one_slot: SandboxState) -> None:
    large = "x" * 200_000
    await run(one_slot, "print(1)")
    (server,) = one_slot.executor.servers()
    sizes = []

    for _ in range(2):
        for _ in range(15):
            await run(one_slot, f"y = '{large}'; print(y)", stdin=large)
        sizes.append(_resident_bytes(server.process.pid))

    (same,) = one_slot.executor.servers()
    assert same is server
    assert sizes[1] <= sizes[0] + (3 << 20)  # a guard that is just forked shares more or less
    assert sizes[1] < 40 << 20


def _resident_bytes(pid: int) -> int:
    """Sum the private memory of a process and its descendants."""
    total = 0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(("Private_Clean:", "Private_Dirty:")):
            total += int(line.split()[1]) * 1024
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return total + sum(_resident_bytes(int(child)) for child in children)
