"""A callback that holds an event loop for long fails the test: health, leases and streams of a service wait for it.

Two things count, and a busy machine makes neither longer. One is the processor's time of the loop's own thread, without
that of the garbage collector. The other is the time that the thread slept in a system call (a file, a lock, the name of
a host) while looks at it found that it used no processor in between: a thread that waits for a processor is runnable,
and one that waits for the interpreter's lock wakes every 5 ms. It is on for the tests of services that serve. What a
test does in its own task does not count; a request through httpx's in-process transport gets a task of its own, as a
server gives it one.
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
MOST_ASLEEP_SECONDS: Final = 0.5
LOOK_SECONDS: Final = 0.02
ROOT: Final = Path(__file__).parents[2]
OURS: Final = tuple(f"{ROOT / 'flotilla' / top}/" for top in ("services", "shared"))
SERVICES: Final = frozenset({"gateway", "rollout", "reward", "sandbox"})
TEST_RUNNER: Final = "_run_tests_and_fixtures"
CREATES_APPS: Final = "create_app"


@dataclass(slots=True)
class _Callback:
    began: float
    clock: int
    collecting: float = 0.0
    stack: list[traceback.FrameSummary] = field(default_factory=list)
    asleep: float = 0.0
    native_id: int = field(default_factory=threading.get_native_id)
    looked: float = field(default_factory=time.monotonic)
    used: float = 0.0

    @property
    def seconds(self) -> float:
        return time.clock_gettime(self.clock) - self.began - self.collecting

    def look(self, frame: FrameType | None) -> None:
        """Add the time since the last look to that asleep, if the thread used no processor and sleeps now.

        An app is created before its process has a loop: what that takes is no hold of one.
        """
        now, used = time.monotonic(), time.clock_gettime(self.clock)
        if _is_in(frame, CREATES_APPS):
            self.collecting += used - max(self.used, self.began)
        if used == self.used and _is_asleep(self.native_id):
            self.asleep += now - self.looked
        self.looked, self.used = now, used


class SlowCallbacks:
    """Finds callbacks that take the loop's thread for too long, and where they were by then.

    Attributes:
        found: a report of each.
    """

    def __init__(self, most_seconds: float = MOST_SECONDS, most_asleep_seconds: float = MOST_ASLEEP_SECONDS) -> None:
        self.found: list[str] = []
        self._most_seconds = most_seconds
        self._most_asleep_seconds = most_asleep_seconds
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
                if self._is_too_long(callback) and _is_ours(callback.stack):
                    took = f"{callback.seconds:.2f} s, asleep {callback.asleep:.2f} s"
                    self.found.append(f"{took}: {handle!r}\n{''.join(_lines(callback.stack))}")

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
                callback.look(sys._current_frames().get(thread))
                if not callback.stack and self._is_too_long(callback):
                    callback.stack = _frames_of(sys._current_frames().get(thread))

    def _is_too_long(self, callback: _Callback) -> bool:
        return callback.seconds > self._most_seconds or callback.asleep > self._most_asleep_seconds


def _is_in(frame: FrameType | None, name: str) -> bool:
    # Another thread goes on meanwhile: what stands behind a frame may be one no longer.
    while isinstance(frame, FrameType):
        if frame.f_code.co_name == name:
            return True
        frame = frame.f_back
    return False


def _is_asleep(native_id: int) -> bool:
    """Whether the kernel has a thread of this process asleep, for an event or a disk; False where it does not tell."""
    try:
        stat = Path(f"/proc/self/task/{native_id}/stat").read_text()
    except OSError:
        return False
    # The name of the thread, in brackets, may have any characters.
    return stat.rpartition(")")[2].split()[0] in "SD"


def _frames_of(frame: FrameType | None) -> list[traceback.FrameSummary]:
    """List the frames, outermost first, without their sources: the callback would be over before those are read."""
    found = []
    while frame is not None:
        code = frame.f_code
        found.append(traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_name, lookup_line=False))
        frame = frame.f_back
    return found[::-1]


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
