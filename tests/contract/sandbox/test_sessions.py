"""A session keeps what its cells define, within limits, and is its owner's alone: the same at every level."""

import asyncio
import os
import time
from collections.abc import AsyncIterator

import pytest

from flotilla.services.sandbox.guard.job import Cell
from flotilla.services.sandbox.guard.session_main import ENDS
from flotilla.services.sandbox.routes.run_code import make_response
from flotilla.services.sandbox.sessions import Session, SessionBusy, SessionEnded
from flotilla.services.sandbox.state import SandboxState
from flotilla.shared.errors import DeadlineExceeded, NotFound
from flotilla.shared.schemas.sandbox import CommandStatus, RunCodeResponse, RunStatus, SessionRequest
from tests.integration.sandbox.campaign import PROGRAMS, SLOW
from tests.integration.sandbox.running import a_sandbox

CELL_SECONDS = 0.5
SPINNING_THREAD = f"""
import threading, time
turns = 0
def spin():
    global turns
    while True:
        turns += 1
threading.Thread(target=spin, daemon=True).start()
time.sleep({CELL_SECONDS})
turns
"""


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


CRASH = "print('a'); import os, sys; sys.stdout.flush(); os.kill(os.getpid(), 11)"
TOO_LARGE = (
    "import os, time\n"
    "for n in range(4):\n"
    "    if os.fork() == 0:\n"
    "        x = b'x' * (40 << 20)\n"
    "        while True: os.sched_yield()\n"
    "time.sleep(30)"
)
rarely = pytest.mark.long


@pytest.fixture(scope="module", params=["A", pytest.param("B", marks=rarely), "C", pytest.param("D", marks=rarely)])
async def state(request: pytest.FixtureRequest) -> AsyncIterator[SandboxState]:
    async with a_sandbox(request.param, queue_seconds=1.0) as opened:
        yield opened


async def opened(state: SandboxState, **fields: float) -> Session:
    session, _ = await state.sessions.open(SessionRequest.model_validate(fields), {"given": "MTI="})
    return session


async def run(state: SandboxState, session: Session, code: str, seconds: float = 20.0) -> tuple[RunCodeResponse, bool]:
    found = await session.run(Cell(code, seconds, ("made",)))
    return make_response(found.result, state.executor.isolation.level), found.is_alive


async def printed(state: SandboxState, session: Session, code: str) -> str | None:
    answer, is_alive = await run(state, session, code)
    assert is_alive, answer
    assert answer.run_result is not None and answer.run_result.stderr == "", answer
    return answer.run_result.stdout


async def test_state_is_kept_and_an_exception_costs_nothing(state: SandboxState) -> None:
    session = await opened(state)

    assert await printed(state, session, "import math\nx = int(open('given').read())\nx + 1") == "13\n"
    answer, is_alive = await run(state, session, "def f():\n    return x / 0\nf()")
    assert (answer.status, is_alive) == (RunStatus.FAILED, True)
    assert answer.run_result is not None and answer.run_result.return_code == 1
    assert "return x / 0" in (answer.run_result.stderr or "") and "session_main" not in (answer.run_result.stderr or "")
    assert await printed(state, session, "print(math.sqrt(x * x)); _ = open('made', 'w').write('abc')") == "12.0\n"
    answer, _ = await run(state, session, "None")
    assert answer.files == {"made": "YWJj"}

    await state.sessions.end(session)
    with pytest.raises(SessionEnded, match="closed by its owner"):
        await run(state, session, "x")
    assert state.sessions.num_living == 0


async def test_a_cell_that_takes_too_long_is_interrupted_and_one_that_goes_on_ends_the_session(
    state: SandboxState,
) -> None:
    session = await opened(state)

    answer, is_alive = await run(state, session, "x = 5\nwhile True: pass", 0.3)
    assert answer.run_result is not None
    assert (answer.run_result.status, is_alive) == (CommandStatus.TIME_LIMIT_EXCEEDED, True)
    assert await printed(state, session, "x") == "5\n"

    stubborn = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
    answer, is_alive = await run(state, session, stubborn, 0.3)
    assert (answer.message, is_alive) == ("time limit exceeded: 0.3 s; it could not be interrupted", False)


async def test_how_an_interpreter_ends_is_told(state: SandboxState) -> None:
    crashed = await opened(state)
    answer, is_alive = await run(
        state, crashed, "print('a'); import os, sys; sys.stdout.flush(); os.kill(os.getpid(), 11)"
    )
    assert (answer.status, answer.message, is_alive) == (RunStatus.FAILED, "the interpreter ended by signal 11", False)
    assert answer.run_result is not None and answer.run_result.stdout == "a\n"
    with pytest.raises(SessionEnded, match="signal 11"):
        await run(state, crashed, "1")

    left = await opened(state)
    answer, is_alive = await run(state, left, "exit(3)")
    assert (answer.message, is_alive) == ("the interpreter ended with exit code 3", False)

    used_up = await opened(state, cpu_seconds=1.0)
    answer, is_alive = await run(state, used_up, "while True: pass", 60)
    assert not is_alive
    assert "processor time" in answer.message or "ended by signal 24" in answer.message

    greedy = await opened(state, memory_limit_MB=64)
    answer, _ = await run(state, greedy, TOO_LARGE, 60)
    assert answer.status is RunStatus.FAILED
    assert "memory limit exceeded" in answer.message
    await state.sessions.end(greedy)
    assert state.executor.num_spoiled == 0


async def test_nothing_runs_between_cells(state: SandboxState) -> None:
    session = await opened(state)
    grown_in_a_cell = float(await printed(state, session, SPINNING_THREAD) or "")
    before = float(await printed(state, session, "turns") or "")
    await asyncio.sleep(4 * CELL_SECONDS)
    after = float(await printed(state, session, "turns") or "")

    # Compared with itself, on the same machine: a thread that went on would turn four times as often.
    assert grown_in_a_cell > 0 and after - before < grown_in_a_cell
    await state.sessions.end(session)


async def test_sessions_are_bounded_and_do_not_meet(state: SandboxState) -> None:
    first, second = await opened(state), await opened(state)
    with pytest.raises(DeadlineExceeded):
        await opened(state)
    await printed(state, first, "secret = 1; _ = open('mine', 'w').write('x')")

    answer, _ = await run(state, second, "import os; print(sorted(os.listdir('.'))); secret")
    assert answer.run_result is not None
    assert answer.run_result.stdout == "['given']\n"
    assert "NameError" in (answer.run_result.stderr or "")

    slow = asyncio.create_task(run(state, first, "import time; time.sleep(0.5)"))
    while first.call is None:
        await asyncio.sleep(0.01)
    with pytest.raises(SessionBusy):
        await run(state, first, "1")
    await slow
    with pytest.raises(NotFound):
        state.sessions.find(first.id, "another's token")
    for session in (first, second):
        await state.sessions.end(session)
    # What ran in their slots is gone, and the slots are good.
    third = await opened(state)
    assert await printed(state, third, "import os; print(sorted(os.listdir('.')))") == "['given']\n"
    await state.sessions.end(third)
    assert state.executor.num_spoiled == 0


async def test_a_session_that_is_not_used_ends(state: SandboxState) -> None:
    idle, old = await opened(state, idle_seconds=0.2), await opened(state, lifetime_seconds=0.2)
    assert idle.task is not None and old.task is not None
    await asyncio.wait([idle.task, old.task], timeout=30)

    with pytest.raises(SessionEnded, match=r"not used for 0\.2 s"):
        await run(state, idle, "1")
    with pytest.raises(SessionEnded, match=r"its life of 0\.2 s"):
        await run(state, old, "1")


async def test_a_session_that_lies_about_its_cells_harms_only_itself(state: SandboxState) -> None:
    liar = await opened(state)
    await run(state, liar, "import os, time; os.write(4, b'01x'); time.sleep(0.2)")
    started = time.monotonic()
    await state.sessions.end(liar)
    assert time.monotonic() - started < 20

    deaf = await opened(state)
    _, is_alive = await run(state, deaf, "import os; os.close(3); os.close(4)", 0.5)
    assert not is_alive
    fine = await opened(state)
    assert await printed(state, fine, "1") == "1\n"
    await state.sessions.end(fine)


@pytest.mark.parametrize("level", ["A", "B", "C"])
@pytest.mark.long
async def test_no_attack_succeeds_from_a_session(level: str) -> None:
    found = {}
    async with a_sandbox(level, queue_seconds=60.0) as state:
        for name in sorted(PROGRAMS.keys() - SLOW):
            session = await opened(state)
            answer, is_alive = await run(state, session, PROGRAMS[name], 8)
            output = (answer.run_result.stdout or "") if answer.run_result else ""
            if name == "forgery: an answer on every descriptor":
                # There a session says itself that its cell has ended: a lie costs it the session.
                assert answer.status is RunStatus.FAILED and not is_alive, answer
                output = output.replace(f"BREACH {ENDS} ", "stopped ")
            if answer.status is RunStatus.SANDBOX_ERROR or "BREACH" in output or not (output or answer.message):
                found[name] = answer.model_dump_json()
            await state.sessions.end(session)
        assert state.executor.num_spoiled == 0
    assert found == {}


async def test_all_of_them_end_with_the_service() -> None:
    async with a_sandbox("C") as state:
        session = await opened(state)
        call = asyncio.create_task(run(state, session, "import time; time.sleep(100)", 200))
        while session.call is None:
            await asyncio.sleep(0.01)
        servers = [server.process.pid for server in state.executor.servers()]

    with pytest.raises(SessionEnded, match="the service stopped"):
        await call
    assert [pid for pid in servers if os.path.exists(f"/proc/{pid}")] == []
