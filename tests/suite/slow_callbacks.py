"""A callback that holds an event loop for long fails the test: health, leases and streams of a service wait for it.

What counts is the processor's time of the loop's own thread, without that of the garbage collector: a busy machine
makes neither longer. It is on for the tests of services that serve. What a test does in its own task does not count; a
request through httpx's in-process transport gets a task of its own, as a server gives it one.
"""

import asyncio
import gc
import sys
import threading
import time
import traceback
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

import httpx
import pytest

MOST_SECONDS: Final = 0.1
LOOK_SECONDS: Final = 0.02
ROOT: Final = Path(__file__).parents[2]
OURS: Final = tuple(f"{ROOT / 'flotilla' / top}/" for top in ("services", "shared"))
SERVICES: Final = frozenset({"gateway", "rollout", "reward", "sandbox"})
TEST_RUNNER: Final = "_run_tests_and_fixtures"


@dataclass(slots=True)
class _Callback:
    began: float
    clock: int
    collecting: float = 0.0
    stack: list[traceback.FrameSummary] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return time.clock_gettime(self.clock) - self.began - self.collecting


class SlowCallbacks:
    """Finds callbacks that take the loop's thread for too long, and where they were by then.

    Attributes:
        found: a report of each.
    """

    def __init__(self, most_seconds: float = MOST_SECONDS) -> None:
        self.found: list[str] = []
        self._most_seconds = most_seconds
        self._running: dict[int, _Callback] = {}
        self._collection_began = 0.0
        self._is_over = threading.Event()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch every loop of this process while the block runs."""
        run = asyncio.Handle._run
        looking = threading.Thread(target=self._look, name="slow callbacks", daemon=True)

        def timed(handle: asyncio.Handle) -> None:
            thread = threading.get_ident()
            clock = time.pthread_getcpuclockid(thread)
            callback = self._running[thread] = _Callback(time.clock_gettime(clock), clock)
            try:
                run(handle)
            finally:
                self._running.pop(thread, None)
                if callback.seconds > self._most_seconds and _is_ours(callback.stack):
                    self.found.append(f"{callback.seconds:.2f} s: {handle!r}\n{''.join(_lines(callback.stack))}")

        handle_request = httpx.ASGITransport.handle_async_request

        async def in_a_task(transport: httpx.ASGITransport, request: httpx.Request) -> httpx.Response:
            return await asyncio.create_task(handle_request(transport, request))

        httpx.ASGITransport.handle_async_request = in_a_task  # type: ignore[method-assign]
        asyncio.Handle._run = timed  # type: ignore[method-assign]
        gc.callbacks.append(self._collects)
        looking.start()
        try:
            yield
        finally:
            asyncio.Handle._run = run  # type: ignore[method-assign]
            httpx.ASGITransport.handle_async_request = handle_request  # type: ignore[method-assign]
            gc.callbacks.remove(self._collects)
            self._is_over.set()
            looking.join()

    def _collects(self, phase: str, _facts: dict[str, int]) -> None:
        if phase == "start":
            self._collection_began = time.thread_time()
        elif (callback := self._running.get(threading.get_ident())) is not None:
            callback.collecting += time.thread_time() - self._collection_began

    def _look(self) -> None:
        while not self._is_over.wait(LOOK_SECONDS):
            for thread, callback in list(self._running.items()):
                if not callback.stack and callback.seconds > self._most_seconds:
                    callback.stack = list(_frames_of(sys._current_frames().get(thread)))


def _frames_of(frame: FrameType | None) -> traceback.StackSummary:
    return traceback.extract_stack(frame) if frame is not None else traceback.StackSummary()


def _is_ours(stack: list[traceback.FrameSummary]) -> bool:
    """Whether a service's code was at work, not the test itself or what it stands in for."""
    start = next((number for number, each in enumerate(stack) if each.name == "timed"), -1)
    frames = stack[start + 1 :]
    is_test = any(each.name == TEST_RUNNER for each in frames)
    return not is_test and any(each.filename.startswith(OURS) for each in frames)


def _lines(stack: list[traceback.FrameSummary]) -> list[str]:
    start = next((number for number, each in enumerate(stack) if each.name == "timed"), -1)
    return traceback.format_list(stack[start + 2 :])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    if SERVICES.isdisjoint(item.path.relative_to(ROOT).parts):
        return (yield)
    callbacks = SlowCallbacks()
    with callbacks.watching():
        result = yield
    if callbacks.found:
        pytest.fail("callbacks held the event loop:\n" + "\n".join(callbacks.found), pytrace=False)
    return result
