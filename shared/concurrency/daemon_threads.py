"""Code that may hang, off the event loop: on a daemon thread of its own, which never keeps a process from ending."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

Value = TypeVar("Value")


def on_daemon_thread(work: Callable[[], Value], name: str) -> "asyncio.Future[Value]":
    """Run ``work`` on a thread of its own; a cancelled caller leaves it running.

    Not an executor: its threads are joined at exit, where work that hangs would keep the process from ending.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Value] = loop.create_future()

    def settle(set_result: Callable[[], None]) -> None:
        if not future.done():
            set_result()

    def run() -> None:
        try:
            value = work()
            set_result = lambda: future.set_result(value)  # noqa: E731
        except StopIteration as error:  # a future refuses this one
            failure: Exception = RuntimeError(f"StopIteration: {error}")
            set_result = lambda: future.set_exception(failure)  # noqa: E731
        except BaseException as error:  # SystemExit too: it must not end the thread in silence
            other = error if isinstance(error, Exception) else RuntimeError(repr(error))
            set_result = lambda: future.set_exception(other)  # noqa: E731
        with suppress(RuntimeError):  # the loop is closed: the process is ending
            loop.call_soon_threadsafe(settle, set_result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
