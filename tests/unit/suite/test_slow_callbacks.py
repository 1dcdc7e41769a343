"""Which callbacks count as holding the loop: those of services, by the processor's time of the loop's own thread."""

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.suite.slow_callbacks import ROOT, SlowCallbacks

SHORT = 0.02
CODE = """
def burn(clock, seconds):
    end = clock() + seconds
    while clock() < end:
        pass
"""


def burning_in(path: str) -> Callable[[float], None]:
    """Make a function of a file that takes the processor."""
    names: dict[str, Any] = {}
    exec(compile(CODE, str(ROOT / path), "exec"), names)
    return lambda seconds: names["burn"](time.thread_time, seconds)


burn = burning_in("flotilla/services/gateway/any.py")


async def found(
    callback: Callable[[], object], *, most_seconds: float = SHORT, most_asleep_seconds: float = 60.0
) -> list[str]:
    callbacks = SlowCallbacks(most_seconds, most_asleep_seconds)
    with callbacks.watching():
        is_done = asyncio.Event()
        asyncio.get_running_loop().call_soon(lambda: (callback(), is_done.set()))
        await is_done.wait()
    return callbacks.found


async def test_a_callback_that_holds_the_loop_is_found_with_its_place() -> None:
    (report,) = await found(lambda: burn(0.08))

    assert "flotilla/services/gateway/any.py" in report and "in burn" in report


async def test_a_short_callback_is_not() -> None:
    assert await found(lambda: burn(0.001)) == []


def doing(text: str, **names: object) -> Callable[[], None]:
    """Make a function of the gateway's that does this."""
    code = compile(text, str(ROOT / "flotilla/services/gateway/any.py"), "exec")
    return lambda: exec(code, dict(names))


@pytest.mark.parametrize("wait", ["lock.acquire(timeout=0.4)", "os.read(pipe, 1)", "time.sleep(0.4)"])
async def test_a_callback_that_waits_in_a_system_call_is_found_with_its_place(wait: str) -> None:
    lock = threading.Lock()
    lock.acquire()
    reading, writing = os.pipe()
    written = threading.Timer(0.4, os.write, (writing, b"x"))
    written.start()

    try:
        (report,) = await found(doing(wait, lock=lock, os=os, pipe=reading, time=time), most_asleep_seconds=0.1)
    finally:
        written.join()
        os.close(reading)
        os.close(writing)

    assert "flotilla/services/gateway/any.py" in report


async def test_a_short_wait_does_not_count() -> None:
    assert await found(doing("time.sleep(0.06)", time=time), most_asleep_seconds=0.3) == []


async def test_waiting_for_a_processor_or_for_the_interpreters_lock_does_not_count() -> None:
    """Other threads hold the lock for most of a second, and processes that do nothing else take the processors."""
    is_over = threading.Event()
    others = [threading.Thread(target=lambda: sum(iter(is_over.is_set, True))) for _ in range(2)]
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    for each in others:
        each.start()
    try:
        slept = await found(lambda: burn(0.3), most_seconds=60.0, most_asleep_seconds=0.1)
    finally:
        is_over.set()
        for process in busy:
            process.kill()
            process.wait()
        for each in others:
            each.join()

    assert slept == []


async def test_what_tests_stand_in_for_does_not_count() -> None:
    assert await found(lambda: burning_in("tests/any.py")(0.06)) == []


async def test_collecting_garbage_does_not_count() -> None:
    def slow(phase: str, _facts: dict[str, int]) -> None:
        if phase == "start":
            burn(0.06)

    def collect() -> None:
        gc.callbacks.append(slow)
        try:
            gc.collect(0)
        finally:
            gc.callbacks.remove(slow)

    assert await found(collect) == []


async def app(_scope: Any, _receive: Any, send: Any) -> None:
    """Take the processor, and answer."""
    burn(0.12)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize(("most_seconds", "count"), [(SHORT, 3), (20 * SHORT, 0)])
async def test_in_the_tests_own_task_each_request_in_process_counts_for_itself(most_seconds: float, count: int) -> None:
    async def _run_tests_and_fixtures() -> None:
        await asyncio.sleep(0)
        burn(0.08)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
            for _ in range(3):
                await client.get("http://app")

    callbacks = SlowCallbacks(most_seconds)
    with callbacks.watching():
        await asyncio.create_task(_run_tests_and_fixtures())

    assert len(callbacks.found) == count
