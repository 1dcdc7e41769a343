"""What every owner of a child process may rely on, whatever becomes of the child."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from flotilla.shared.children.calls import CallProcess, running
from flotilla.shared.children.processes import unheard
from flotilla.shared.errors import DataError, DeadlineExceeded, FlotillaError, InvalidSpec, WorkerDied

COMMAND = [sys.executable, str(Path(__file__).with_name("worker.py"))]
KINDS = ("in turn", "at once")
SECONDS = 60.0
pytestmark = pytest.mark.parametrize("kind", KINDS)


def a_process(kind: str, what: str = "", **options: Any) -> CallProcess:
    return CallProcess(COMMAND, [kind, what], "the worker", on_line=unheard, **options)


@asynccontextmanager
async def started(kind: str, **options: Any) -> AsyncIterator[CallProcess]:
    process = a_process(kind, **options)
    try:
        await process.start()
        yield process
    finally:
        await process.aclose()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.01)


def lives(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("die", "ended with code 7; its last lines: the reason"),
        ("kill", r"ended with code -9 \(SIGKILL, (by hand or for memory|killed by the kernel.*)\)"),
        ("half", "wrote what is no answer|ended with code 0"),
        ("garbage", "wrote what is no answer"),
        ("nested", "wrote what is no answer"),
        ("large", "wrote what is no answer"),
    ],
)
async def test_a_child_that_fails_says_why_and_is_started_again(kind: str, what: str, match: str) -> None:
    async with started(kind, max_line_bytes=1 << 16) as process:
        with pytest.raises(WorkerDied, match=f"^the process of the worker ({match})"):
            await process.call(what, seconds=SECONDS)
        with pytest.raises(WorkerDied, match=f"^the process of the worker ({match})"):
            await process.call("again", seconds=SECONDS)

        await process.start()

        assert await process.call("again", seconds=SECONDS) == "again"


async def test_a_child_that_dies_is_noticed_while_its_own_child_holds_its_pipes(kind: str) -> None:
    async with started(kind) as process:
        with pytest.raises(WorkerDied, match="ended with code 7"):
            await process.call("fork and die", seconds=SECONDS)


async def test_a_call_made_during_a_start_that_fails_fails_with_it(kind: str) -> None:
    process = a_process(kind, "hang")
    starting = asyncio.create_task(process.start())
    await until(lambda: process.child is not None)
    calling = asyncio.create_task(process.call("again"))
    await until(lambda: process.num_waiting)

    starting.cancel()

    with pytest.raises(WorkerDied):
        await asyncio.wait_for(calling, SECONDS)
    await asyncio.gather(starting, return_exceptions=True)


async def test_an_error_that_json_cannot_say_is_an_error_all_the_same(kind: str) -> None:
    async with started(kind) as process:
        with pytest.raises(DataError, match="no such row"):
            await process.call("odd", seconds=SECONDS)


async def test_code_that_is_cancelled_from_within_is_an_error(kind: str) -> None:
    async with started(kind) as process:
        ends = {"in turn": "the process of the worker ended with code", "at once": "was cancelled by its own code"}
        with pytest.raises(FlotillaError, match=ends[kind]):
            await process.call("cancelled", seconds=SECONDS)


@pytest.mark.parametrize("what", ["stop", "half and silence"])
async def test_a_child_that_is_stopped_or_silent_keeps_nobody_longer_than_the_deadline(kind: str, what: str) -> None:
    async with started(kind) as process:
        child = process.child
        with pytest.raises(DeadlineExceeded, match=r"the worker did not answer within 0\.2 s"):
            await process.call(what, seconds=0.2)

    assert child is not None and child.exit_code == -signal.SIGKILL


async def test_what_it_prints_without_end_neither_blocks_it_nor_is_taken_for_an_answer(kind: str) -> None:
    async with started(kind) as process:
        assert await process.call("flood", seconds=SECONDS) == "flood"
        assert process.child is not None
        assert len(process.child.words.shown()) < 4000


async def test_errors_of_the_other_side_are_raised_here_and_the_next_call_is_answered(kind: str) -> None:
    async with started(kind) as process:
        with pytest.raises(DataError, match="no such row") as raised:
            await process.call("refuse", seconds=SECONDS)
        assert (raised.value.errors, raised.value.context) == ([{"field": "row"}], {"row": 7})
        with pytest.raises(FlotillaError, match="KeyError: 'x'"):
            await process.call("raise", seconds=SECONDS)
        with pytest.raises(FlotillaError, match="not JSON serializable"):
            await process.call("object", seconds=SECONDS)

        assert await process.call("fine", seconds=SECONDS) == "fine"


async def test_two_calls_at_once_have_each_its_answer(kind: str) -> None:
    async with started(kind) as process:
        found = await asyncio.gather(*(process.call(each, seconds=SECONDS) for each in (0.05, "a", 0.01, "b")))

    assert found == [0.05, "a", 0.01, "b"]


async def test_progress_of_a_call_comes_before_its_answer(kind: str) -> None:
    heard: list[int] = []
    async with started(kind) as process:
        assert await process.call("progress", seconds=SECONDS, on_progress=heard.append) == "progress"
        assert heard == [1, 2]
        assert await process.call("progress", seconds=SECONDS) == "progress", "nobody has to hear of it"


async def test_what_it_is_told_is_done_in_order_and_not_answered(kind: str) -> None:
    async with started(kind) as process:
        for each in ("a", "refuse", "b"):
            process.tell(each)

        assert await process.call("told", seconds=SECONDS) == ["", "a", "b"]
        await process.aclose()
        with pytest.raises(WorkerDied, match=r"ended with code -9 \(SIGKILL\)"):
            process.tell("c")


async def test_lines_of_standard_error_are_passed_on_as_they_come(kind: str) -> None:
    lines: list[str] = []
    process = CallProcess(COMMAND, [kind, ""], "the worker", on_line=lines.append)
    await process.start()
    with pytest.raises(WorkerDied):
        await process.call("die", seconds=SECONDS)

    assert lines[-1] == "the reason"


async def test_a_call_that_is_cancelled_leaves_no_stale_answer(kind: str) -> None:
    async with started(kind) as process:
        first = process.child
        cancelled = asyncio.create_task(process.call(600.0))
        await until(lambda: process.num_waiting)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled

        await process.start()

        assert await process.call("next", seconds=SECONDS) == "next"
        assert (process.child is first) is (kind == "at once"), "one that cannot give a call up is killed"
        assert process.num_waiting == 0


async def test_what_is_too_large_is_refused_and_the_child_lives(kind: str) -> None:
    async with started(kind, max_line_bytes=1000) as process:
        with pytest.raises(WorkerDied, match="too large"):
            await process.call("x" * 1000, seconds=SECONDS)

        assert await process.call("x", seconds=SECONDS) == "x"


async def test_closing_ends_the_child_its_own_children_and_the_calls_under_way(kind: str) -> None:
    async with started(kind) as process:
        left = await process.call("leave", seconds=SECONDS)
        waiting = asyncio.create_task(process.call(600.0))
        await until(lambda: process.num_waiting)

    with pytest.raises(WorkerDied, match=r"ended with code -9 \(SIGKILL\)"):
        await waiting
    await until(lambda: not lives(left))


async def test_a_child_that_died_keeps_nobody_waiting_for_its_own_children(kind: str) -> None:
    async with started(kind) as process:
        left = await process.call("leave", seconds=SECONDS)
        with pytest.raises(WorkerDied, match="ended with code 7"):
            await process.call("die", seconds=SECONDS)
        await until(lambda: not lives(left))


async def test_it_knows_no_secret_and_reads_no_call_as_input(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOTILLA_TOKEN", "secret")
    async with started(kind) as process:
        assert "secret" not in (await process.call("environment", seconds=SECONDS)).values()
        assert await process.call("input", seconds=SECONDS) == ""


@pytest.mark.parametrize(
    ("what", "error", "match"),
    [
        ("refuse", DataError, "no such row"),
        ("die", InvalidSpec, "ended while it loaded the file; its last lines: the reason"),
        ("kill", WorkerDied, "ended by SIGKILL while it loaded"),
        ("garbage", InvalidSpec, "no answer while it loaded"),
        ("hang", DeadlineExceeded, r"the worker was not loaded within 0\.5 s"),
    ],
)
async def test_what_cannot_be_loaded_is_said_at_the_start(
    kind: str, what: str, error: type[FlotillaError], match: str
) -> None:
    process = a_process(kind, what, start_seconds=0.5 if what == "hang" else SECONDS)

    with pytest.raises(error, match=match):
        await process.start()

    assert process.child is None


@pytest.mark.parametrize("what", ["die", "kill"])
async def test_an_end_is_not_what_it_loads_to_blame_for_where_the_owner_says_so(kind: str, what: str) -> None:
    with pytest.raises(WorkerDied, match=r"^the process of the worker, while it loaded, ended with code (7|-9)"):
        await a_process(kind, what, blames_opening=False).start()


async def test_a_program_that_is_not_there_is_said(kind: str) -> None:
    with pytest.raises(WorkerDied, match="the process of the worker cannot be started"):
        await CallProcess(["/no/such/program"], kind, "the worker").start()


OWNER = """
import asyncio, sys
from tests.contract.children.test_calls import a_process
async def main():
    process = a_process(sys.argv[1])
    print(await process.start(), flush=True)
    await process.call(600.0)
asyncio.run(main())
"""


async def test_it_ends_with_its_parent_even_in_the_middle_of_a_call(kind: str) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, kind], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid = int(await asyncio.to_thread(owner.stdout.readline))
    assert lives(pid)

    owner.kill()
    owner.wait()

    await until(lambda: not lives(pid))
    owner.stdout.close()


@pytest.mark.parametrize("policy", [asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy])
def test_threads_call_it_as_coroutines_do_whatever_loops_the_service_has(
    kind: str, policy: type[asyncio.AbstractEventLoopPolicy]
) -> None:
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(policy())
    try:
        call_from_threads(kind)
    finally:
        asyncio.set_event_loop_policy(before)


def call_from_threads(kind: str) -> None:
    process = a_process(kind)
    with running(process) as calls, ThreadPoolExecutor(2) as pool:
        pid = calls.about
        found = list(pool.map(lambda each: calls.call(each, seconds=SECONDS), ("a", "b")))
        with pytest.raises(WorkerDied, match="ended with code 7"):
            calls.call("die", seconds=SECONDS)
        again = calls.call("again", seconds=SECONDS)

    assert again == "again"
    assert found == ["a", "b"]
    assert pid != os.getpid() and not lives(pid)
