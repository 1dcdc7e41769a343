"""A slot is clean before it is given back, however often who used it is cancelled."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from flotilla.services.sandbox import executor as executor_module
from flotilla.services.sandbox.executor import Executor, Program
from flotilla.services.sandbox.fork_servers import ForkServer, Groups
from flotilla.services.sandbox.isolation import Isolation, Slot
from flotilla.services.sandbox.limits import Limits

LIMITS = Limits()
PROGRAM = Program({}, (), (), LIMITS, "caller")


class FakeServer:
    """Takes a job and never answers; its end takes until it is allowed, and may fail."""

    is_usable = True

    def __init__(self, slot: Slot, failure: OSError | None = None) -> None:
        self.slot = slot
        self.asking, self.ending, self.may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._failure = failure

    def bound(self, limits: Limits) -> None:
        assert limits is LIMITS

    @asynccontextmanager
    async def asked(self, _: bytes) -> AsyncIterator[Any]:
        self.asking.set()
        await asyncio.Event().wait()
        yield

    async def end(self) -> None:
        self.ending.set()
        await self.may_end.wait()
        if self._failure is not None:
            raise self._failure


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "_job", lambda *_, **__: b"")


class FakeIsolation:
    def __init__(self, *, has_private_root: bool) -> None:
        self.has_private_root = has_private_root


def an_executor(server: FakeServer, *, has_private_root: bool = True) -> Executor:
    isolation = cast(Isolation, FakeIsolation(has_private_root=has_private_root))
    executor = Executor(isolation, cast(Groups, None))
    executor._servers[server.slot.number] = cast(ForkServer, server)
    return executor


async def use(executor: Executor, slot: Slot) -> None:
    async with executor.session(slot, PROGRAM):
        pass


async def cancel_often(task: asyncio.Task[None]) -> None:
    for _ in range(3):
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)


@pytest.mark.parametrize("failure", [None, OSError("the group is busy")])
async def test_a_session_that_is_cancelled_often_gives_its_slot_back_once_its_server_has_ended(
    failure: OSError | None,
) -> None:
    slot = Slot(0, None, Path("/s"))
    server = FakeServer(slot, failure)
    executor = an_executor(server)
    session = asyncio.create_task(use(executor, slot))
    await server.asking.wait()

    await cancel_often(session)

    assert server.ending.is_set()
    assert not session.done(), "the server has not ended"
    server.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await session
    assert executor.num_spoiled == (0 if failure is None else 1)


async def test_a_session_that_is_cancelled_often_gives_its_slot_back_once_its_files_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = Slot(0, None, tmp_path)
    server = FakeServer(slot)
    server.may_end.set()
    removing, may_remove = asyncio.Event(), asyncio.Event()

    async def slowly(_function: object, path: Path) -> None:
        removing.set()
        await may_remove.wait()
        path.rmdir()

    monkeypatch.setattr(executor_module, "remove_if_small", lambda _: False)
    monkeypatch.setattr(asyncio, "to_thread", slowly)
    session = asyncio.create_task(use(an_executor(server, has_private_root=False), slot))
    await server.asking.wait()

    await cancel_often(session)

    assert removing.is_set()
    assert not session.done(), "its files are there"
    may_remove.set()
    with pytest.raises(asyncio.CancelledError):
        await session
    assert list(tmp_path.iterdir()) == []
