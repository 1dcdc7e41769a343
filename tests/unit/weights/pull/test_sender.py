"""What whoever sends is told of a process that cannot, and what that process keeps of a call that it refuses."""

import asyncio
import os
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest

from flotilla.shared.errors import FlotillaError, Unavailable, WorkerDied
from flotilla.shared.weights.pull import sender as sender_module
from flotilla.shared.weights.pull.sender import ProcessSender
from flotilla.shared.weights.pull.sending import Sender


class Refusing:
    """A process, and an image, of which nothing is sent."""

    def __init__(self, error: FlotillaError) -> None:
        self._error = error

    def order(self, *_: object, **__: object) -> Future[Any]:
        refused: Future[Any] = Future()
        refused.set_exception(self._error)
        return refused

    def fileno(self) -> int:
        return 0


@pytest.mark.parametrize("kind", [WorkerDied, Unavailable, FlotillaError])
def test_whatever_the_process_refuses_is_an_error_of_the_connection(
    kind: type[FlotillaError], monkeypatch: pytest.MonkeyPatch
) -> None:
    process: Any = Refusing(kind("no descriptors"))
    sender = ProcessSender()
    monkeypatch.setattr(sender, "_started", lambda: process)

    with pytest.raises(ConnectionResetError, match="no descriptors"):
        sender._move(0, process, range(8), is_local=False)


async def test_a_call_of_which_one_descriptor_arrived_is_refused_and_leaves_none_open() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sender = object.__new__(Sender)  # a whole one lowers the priority of its process
    sender._control = theirs
    reads, writes = os.pipe2(os.O_NONBLOCK)
    with ours, theirs, open(reads, "rb", buffering=0) as end:
        socket.send_fds(ours, [b"\0"], [writes])
        os.close(writes)

        with pytest.raises(Unavailable, match="1 of 2 descriptors"):
            await sender.handle((0, 8, False))

        assert end.read() == b""  # not None: nobody can write any more


def test_threads_that_ask_at_once_have_one_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    def slow() -> object:
        time.sleep(0.2)
        made.append(object())
        return made[-1]

    monkeypatch.setattr(sender_module, "_only_loop", cache(slow))
    with ThreadPoolExecutor(4) as threads:
        found: set[asyncio.AbstractEventLoop] = set(threads.map(lambda _: sender_module._loop(), range(4)))

    assert len(found) == len(made) == 1
