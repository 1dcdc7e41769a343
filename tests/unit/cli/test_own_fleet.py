"""Two things that begin at once: both are waited for, and the first failure of either ends both."""

import asyncio

import pytest

from flotilla.cli.own_fleet import beside
from flotilla.shared.errors import Unavailable, WorkerDied


class Work:
    """Goes on until it is let go, and knows how it ended."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.may_end, self.began, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.was_cancelled = False
        self._failure = failure

    async def run(self) -> None:
        self.began.set()
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        finally:
            self.ended.set()
        if self._failure is not None:
            raise self._failure


async def test_it_is_left_when_both_are_done() -> None:
    work, after = Work(), False

    async with beside(work.run()):
        await work.began.wait()
        asyncio.get_running_loop().call_soon(work.may_end.set)
        assert not work.ended.is_set()
    after = work.ended.is_set()

    assert after
    assert not work.was_cancelled


async def test_work_that_fails_ends_the_body_and_is_what_is_raised() -> None:
    work, ended = Work(WorkerDied("prepare ended with exit code 3")), False

    with pytest.raises(WorkerDied, match="exit code 3"):
        async with beside(work.run()):
            work.may_end.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended = True

    assert ended


async def test_a_body_that_fails_ends_the_work_and_is_what_is_raised() -> None:
    work = Work()

    with pytest.raises(Unavailable, match="no port"):
        async with beside(work.run()):
            await work.began.wait()
            raise Unavailable("no port")

    assert work.was_cancelled


@pytest.mark.parametrize("is_body_done", [True, False])
async def test_cancelling_ends_both(is_body_done: bool) -> None:
    work, reached = Work(), asyncio.Event()

    async def both() -> None:
        async with beside(work.run()):
            await work.began.wait()
            reached.set()
            if not is_body_done:
                await asyncio.Event().wait()

    task = asyncio.create_task(both())
    await reached.wait()
    await asyncio.sleep(0)
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.was_cancelled
