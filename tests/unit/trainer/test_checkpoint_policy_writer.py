"""Training goes on while a checkpoint is written, and nothing is final before it is whole."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flotilla.services.trainer.checkpoint.manager import Progress
from flotilla.services.trainer.worker import checkpoint_policy
from flotilla.services.trainer.worker.checkpoint_policy import CheckpointPolicy, CheckpointWriter
from flotilla.shared.checkpoints.lineage import INITIAL, VersionLine
from flotilla.shared.config.sections.checkpoint import BestCheckpointsConfig, CheckpointConfig
from flotilla.shared.errors import ClaimLost, Unavailable
from flotilla.shared.schemas.service import Failure

DEADLINE_SECONDS = 20.0


class Disk:
    """The manager of checkpoints, whose writes of copies wait until they may go on."""

    def __init__(self, failures: int = 0, *, has_memory: bool = True) -> None:
        self.copied: list[tuple[int, float | None]] = []
        self.saved: list[int] = []
        self.begun, self.may_end = threading.Semaphore(0), threading.Semaphore(0)
        self.failures, self._has_memory = failures, has_memory

    def copy(self, _: Any, progress: Progress, __: Any, figure: float | None) -> int | None:
        if not self._has_memory:
            return None
        self.copied.append((progress.step, figure))
        return progress.step

    def write(self, step: int) -> Path:
        self.begun.release()
        assert self.may_end.acquire(timeout=DEADLINE_SECONDS)
        if self.failures:
            self.failures -= 1
            raise Unavailable("no space left")
        return Path(str(step))

    def save(self, _: Any, progress: Progress, *__: Any) -> Path:
        self.saved.append(progress.step)
        if self.failures:
            self.failures -= 1
            raise Unavailable("no space left")
        return Path(str(progress.step))

    async def until_begun(self) -> None:
        await asyncio.to_thread(self.begun.acquire, timeout=DEADLINE_SECONDS)


class Queue:
    """Plans of every step; a crowded stream has room again once a step is committed."""

    def __init__(self) -> None:
        self.committed: list[int] = []
        self.is_crowded, self.is_fenced = False, False

    async def retained(self) -> Any:
        return SimpleNamespace(size_bytes=0, planned=0, entries=0, is_crowded_by=lambda _: self.is_crowded)

    async def commit(self, steps: list[int]) -> None:
        if self.is_fenced:
            raise ClaimLost("a later trainer took over")
        self.committed += steps
        self.is_crowded = False

    async def record(self, _: Any) -> None:
        pass


class Source:
    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self.durable: list[int] = []

    async def commit(self, until: int, trained: Any, steps: Sequence[int] | None = None) -> None:
        planned = [step for step in range(1, 10) if step not in self._queue.committed] if steps is None else steps
        await self._queue.commit([step for step in planned if step <= until])
        self.durable = [each for start, end in trained.to_list() for each in range(start, end + 1)]


class Around:
    """A policy with a checkpoint after every second step; step N trains group N."""

    def __init__(self, disk: Disk, **checkpoint: Any) -> None:
        self.failures: list[Failure | None] = []
        self.disk, self.queue = disk, Queue()
        self.source = Source(self.queue)
        self.reported: list[int] = []
        self.compute = ThreadPoolExecutor(1)
        self._progress = Progress.start()
        learner = cast(Any, SimpleNamespace(spec=SimpleNamespace(groups_per_step=1)))
        line = VersionLine.of([INITIAL], steps_per_version=1, total_steps=9)
        state = learner, self._progress, line
        reporter = SimpleNamespace(sync=lambda: None, checkpoint=lambda view: self.reported.append(view.step))
        around = cast(Any, self.source), cast(Any, reporter), self.compute, self.failures.append
        writer = CheckpointWriter(cast(Any, disk), *state, *around)
        self.policy = CheckpointPolicy(
            CheckpointConfig(every_steps=2, **checkpoint), writer, *state, cast(Any, self.queue)
        )

    async def step(self, number: int, is_stopped: Callable[[], bool] = lambda: False, **values: float) -> None:
        self._progress.step = number
        self._progress.trained.add(number)
        await asyncio.wait_for(self.policy.after_step(is_stopped, values), DEADLINE_SECONDS)


@asynccontextmanager
async def running(disk: Disk, **checkpoint: Any) -> AsyncIterator[Around]:
    around = Around(disk, **checkpoint)
    working = asyncio.create_task(around.policy.run())
    try:
        yield around
    finally:
        for _ in range(9):
            disk.may_end.release()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        around.compute.shutdown()


async def test_steps_go_on_while_it_is_written_and_are_final_when_it_is_whole() -> None:
    disk = Disk()
    async with running(disk) as around:
        await around.step(1)
        await around.step(2)
        await disk.until_begun()
        await around.step(3)

        assert (around.queue.committed, around.reported, around.source.durable) == ([], [], [])
        assert not around.policy.is_durable
        assert "checkpoint/write_seconds" not in around.policy.take_figures()
        disk.may_end.release()
        await around.policy.settled()

        # What was copied after step 2 holds nothing of step 3.
        assert (around.queue.committed, around.reported, around.source.durable) == ([1, 2], [2], [1, 2])
        assert not around.policy.is_durable
        assert around.policy.take_figures()["checkpoint/write_seconds"] > 0
        assert "checkpoint/write_seconds" not in around.policy.take_figures()


async def test_the_next_one_waits_for_the_one_before() -> None:
    disk = Disk()
    async with running(disk) as around:
        await around.step(2)
        await around.step(3)
        fourth = asyncio.create_task(around.step(4))
        await disk.until_begun()
        assert disk.copied == [(2, None)] and not fourth.done()

        disk.may_end.release()
        await fourth

        assert disk.copied == [(2, None), (4, None)]
        assert around.queue.committed == [1, 2]


async def test_one_that_fails_is_named_and_made_again_after_the_next_step() -> None:
    disk = Disk(failures=1)
    disk.may_end = threading.Semaphore(9)
    async with running(disk, best=BestCheckpointsConfig(metric="reward/mean")) as around:
        await around.step(2, **{"reward/mean": 0.5})
        await around.policy.settled()
        named = list(around.failures)
        await around.step(3, **{"reward/mean": 0.7})
        await around.policy.settled()
        await around.step(5, **{"reward/mean": 0.1})
        await around.policy.settled()

    assert [failure.cause for failure in named if failure is not None] == ["no space left"]
    assert around.failures[-1] is None
    # What the failed one was to be compared by counts towards the next.
    assert disk.copied == [(2, 0.5), (3, pytest.approx(0.6)), (5, 0.1)]
    assert around.queue.committed == [1, 2, 3, 4, 5]


async def test_training_waits_where_none_was_written_for_a_whole_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_policy, "PAUSE_SECONDS", 0.001)
    disk = Disk(failures=5)
    disk.may_end = threading.Semaphore(9)
    async with running(disk) as around:
        for step in (2, 3, 4):
            await around.step(step)
            await around.policy.settled()

    assert [step for step, _ in disk.copied] == [2, 3]
    assert disk.saved == [4, 4, 4, 4]
    assert around.queue.committed == [1, 2, 3, 4]


async def test_without_memory_for_a_copy_training_waits_for_the_disk() -> None:
    async with running(Disk(has_memory=False)) as around:
        await around.step(2)

        assert around.disk.saved == [2]
        assert around.queue.committed == [1, 2]


async def test_planned_groups_that_fill_the_stream_wait_for_the_checkpoint_that_is_written() -> None:
    disk = Disk()
    async with running(disk) as around:
        await around.step(2)
        around.queue.is_crowded = True
        third = asyncio.create_task(around.step(3))
        await disk.until_begun()
        disk.may_end.release()
        await third

    # It made room: another one is not due.
    assert disk.copied == [(2, None)]


async def test_the_end_waits_for_it_and_writes_what_is_left_at_once() -> None:
    disk = Disk()
    async with running(disk) as around:
        await around.step(2)
        await around.step(3)
        ending = asyncio.create_task(
            around.policy.at_the_end(is_over=True, is_stopped=lambda: True, publisher=cast(Any, None))
        )
        await disk.until_begun()
        assert not disk.saved

        disk.may_end.release()
        await asyncio.wait_for(ending, DEADLINE_SECONDS)

        assert (disk.saved, around.queue.committed) == ([3], [1, 2, 3])
        assert around.policy.is_durable


async def test_a_trainer_that_was_replaced_ends() -> None:
    disk = Disk()
    around = Around(disk)
    around.queue.is_fenced = True
    working = asyncio.create_task(around.policy.run())
    await around.step(2)
    disk.may_end.release()

    with pytest.raises(ClaimLost):
        await asyncio.wait_for(working, DEADLINE_SECONDS)
    # Whoever waits for it is not left waiting.
    await asyncio.wait_for(around.policy.settled(), DEADLINE_SECONDS)
    around.compute.shutdown()


async def test_cancelled_it_ends_when_the_thread_does_and_commits_nothing() -> None:
    disk = Disk()
    around = Around(disk)
    working = asyncio.create_task(around.policy.run())
    await around.step(2)
    await disk.until_begun()

    working.cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not working.done()
    disk.may_end.release()
    await asyncio.wait({working}, timeout=DEADLINE_SECONDS)

    assert working.cancelled()
    assert around.queue.committed == []
    around.compute.shutdown()
