"""Which callbacks count as holding the loop: those of services, by the processor's time of the loop's own thread."""

import asyncio
import gc
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


async def found(callback: Callable[[], object]) -> list[str]:
    callbacks = SlowCallbacks(SHORT)
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


async def test_waiting_for_a_busy_machine_does_not_count() -> None:
    sleep = compile("sleep(0.06)", str(ROOT / "flotilla/services/gateway/any.py"), "exec")

    assert await found(lambda: exec(sleep, {"sleep": time.sleep})) == []


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
