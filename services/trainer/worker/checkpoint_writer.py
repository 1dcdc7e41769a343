"""Makes one checkpoint after the other whole, and what it contains final: at once, or beside the next steps.

    copy (a step waits) -> files on the disk, flushed -> renamed: whole -> plans committed -> reported

Nothing is released before the checkpoint is whole: until then the plans of its steps can be replayed. At most one copy
exists; whoever makes the next checkpoint waits for the one before.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from flotilla.services.trainer.checkpoint.manager import CheckpointManager, CopiedCheckpoint, Progress
from flotilla.services.trainer.data.source import GroupSource
from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.worker.reporter import Reporter
from flotilla.shared.checkpoints.lineage import VersionLine
from flotilla.shared.clock import rfc3339
from flotilla.shared.errors import Unavailable
from flotilla.shared.net.retry import DATA_PLANE, retry
from flotilla.shared.schemas.experiment import CheckpointView
from flotilla.shared.schemas.service import Failure
from flotilla.shared.streams.intervals import IntervalSet
from flotilla.shared.streams.plans import TrainerQueue

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Point:
    """What a checkpoint contains, as it was when its state was taken.

    Attributes:
        step: the last one.
        version: that the weights are, or are trained from.
        trained: ids of all groups trained in the lineage.
        figure: what it is compared with others by.
    """

    step: int
    version: int
    trained: IntervalSet
    figure: float | None

    @classmethod
    def of(cls, progress: Progress, line: VersionLine, figure: float | None) -> "Point":
        """Take what progress is now."""
        trained = IntervalSet.from_list(progress.trained.to_list())
        return cls(progress.step, line.at(progress.step), trained, figure)


class CheckpointWriter:
    """Writes and commits.

    Args:
        manager: writes.
        learner, progress, line: what.
        queue, source: told when steps are final.
        reporter: told of each checkpoint.
        compute: the thread that may touch the weights.
        on_failure: told that a checkpoint failed and will be tried again, and None when one succeeded.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        learner: Learner,
        progress: Progress,
        line: VersionLine,
        queue: TrainerQueue,
        source: GroupSource,
        reporter: Reporter,
        compute: Executor,
        on_failure: Callable[[Failure | None], None],
    ) -> None:
        self._manager, self._learner, self._progress, self._line = manager, learner, progress, line
        self._queue, self._source, self._reporter = queue, source, reporter
        self._compute, self._on_failure = compute, on_failure
        self._handed: asyncio.Queue[tuple[Point, CopiedCheckpoint]] = asyncio.Queue()
        self._settled = asyncio.Event()
        self._settled.set()
        self._write_seconds: float | None = None
        self.durable_step = progress.step
        self.reached_step = progress.step
        """Steps that are durable, or will be when what is being written is."""

    @property
    def is_busy(self) -> bool:
        """Whether a copy is being written."""
        return not self._settled.is_set()

    async def settled(self) -> None:
        """Wait until no copy is being written."""
        await self._settled.wait()

    async def run(self) -> None:
        """Write what is copied, until cancelled; then what is under way is written to its end, and not committed.

        Raises:
            ClaimLost: a later trainer took over.
        """
        while True:
            point, copied = await self._handed.get()
            try:
                await self._write(point, copied)
            except Unavailable as error:
                self.tell_failure(error)
            finally:
                self.reached_step = self.durable_step
                self._settled.set()

    async def save(self, figure: float | None) -> None:
        """Make a checkpoint of the state as it is now.

        Raises:
            Unavailable: the disk is full or not writable.
        """
        started, point = time.monotonic(), Point.of(self._progress, self._line, figure)
        await self._on_compute_thread(self._reporter.sync)
        save = partial(self._manager.save, self._learner, self._progress, self._line, figure)
        await self._finish(point, await self._on_compute_thread(save))
        self._write_seconds = time.monotonic() - started

    async def copy(self, figure: float | None) -> bool:
        """Copy the state as it is now, and let it be written beside the next steps; False where memory is too short.

        Raises:
            Unavailable: it could not be copied.
        """
        assert not self.is_busy
        point = Point.of(self._progress, self._line, figure)
        copy = partial(self._manager.copy, self._learner, self._progress, self._line, figure)
        copied = await self._on_compute_thread(copy)
        if copied is None:
            return False
        self.reached_step = point.step
        self._settled.clear()
        self._handed.put_nowait((point, copied))
        return True

    def tell_failure(self, error: Unavailable) -> None:
        """Say that a checkpoint could not be written for now."""
        log.warning("checkpoint failed, it is tried again", extra={"error": error.detail})
        self._on_failure(Failure(component="checkpoint", cause=error.detail, fatal=False))

    def take_write_seconds(self) -> float | None:
        """Return how long the last checkpoint took to be durable, once; None if none became so since."""
        found, self._write_seconds = self._write_seconds, None
        return found

    async def _write(self, point: Point, copied: CopiedCheckpoint) -> None:
        started = time.monotonic()

        def write() -> Path:
            self._reporter.sync()
            return self._manager.write(copied)

        await self._finish(point, await _to_its_end(write))
        self._write_seconds = time.monotonic() - started

    async def _finish(self, point: Point, path: Path) -> None:
        self.durable_step = self.reached_step = point.step
        self._on_failure(None)
        # What stands, rather than what was planned since the last time: a server that came back from its log at an
        # earlier state has steps again that were committed before.
        standing = [plan.step for plan in await retry(partial(self._queue.plans_from, 0), waiting_for=DATA_PLANE)]
        await self.commit(standing, point.step, point.trained)
        view = CheckpointView(step=point.step, version=point.version, path=str(path), at=rfc3339(time.time()))
        self._reporter.checkpoint(view)
        log.info("checkpoint is durable", extra={"step": view.step, "path": view.path})

    async def commit(self, steps: list[int], until: int, trained: IntervalSet) -> None:
        """Make steps final.

        Args:
            steps: with a plan.
            until: the last one that is final.
            trained: ids of the groups of all of them, and of those before.
        """
        final = [step for step in steps if step <= until]
        if final:
            await retry(partial(self._queue.commit, final), waiting_for=DATA_PLANE)
        await retry(partial(self._queue.record, self._source.plans_until(until)), waiting_for=DATA_PLANE)
        await retry(partial(self._source.on_durable, trained), waiting_for=DATA_PLANE)

    async def _on_compute_thread(self, work: Callable[[], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._compute, work)


async def _to_its_end(work: Callable[[], Answer]) -> Answer:
    """Do it on another thread; cancelled, wait for its end, since nothing can interrupt it."""
    working = asyncio.create_task(asyncio.to_thread(work), name="checkpoint")
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait({working})
        raise
