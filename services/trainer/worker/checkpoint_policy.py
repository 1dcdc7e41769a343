"""When a checkpoint is due, and what becomes final with it: the plans of the steps that it contains.

Checkpoints are made where the weights are a published version, so that a trainer that comes back can publish that
version again. A checkpoint that cannot be written (a full disk) is tried again after each version; training continues
for one more interval, as its plans can still be replayed, and then waits.

What the steps since the last checkpoint trained stays in the scored stream. Where that would leave no room for another
step under the stream's bound, a checkpoint is made before it is due.

Makes one checkpoint after the other whole, and what it contains final: at once, or beside the next steps.

    copy (a step waits) -> files on the disk, flushed -> renamed: whole -> plans committed -> reported

Nothing is released before the checkpoint is whole: until then the plans of its steps can be replayed. At most one copy
exists; the next checkpoint waits for the one before.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from flotilla.services.trainer.checkpoint.manager import CheckpointManager, CopiedCheckpoint, Progress
from flotilla.services.trainer.data.source import GroupSource
from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.worker.publisher import Publisher
from flotilla.services.trainer.worker.reporter import Reporter
from flotilla.shared.checkpoints.lineage import VersionLine
from flotilla.shared.clock import rfc3339
from flotilla.shared.config.sections.checkpoint import CheckpointConfig
from flotilla.shared.errors import FlotillaError, Unavailable
from flotilla.shared.net.retry import DATA_PLANE, retry
from flotilla.shared.schemas.experiment import CheckpointView
from flotilla.shared.schemas.service import Failure
from flotilla.shared.streams.intervals import IntervalSet
from flotilla.shared.streams.plans import RECENT_STEPS, TrainerQueue

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
        return cls(progress.step, line.at(progress.step), progress.trained.copy(), figure)


class CheckpointWriter:
    """Writes and commits.

    Args:
        manager: writes.
        learner, progress, line: what.
        source: notified when steps are final.
        reporter: notified of each checkpoint.
        compute: the thread that may touch the weights.
        on_failure: called with the failure of a checkpoint that will be retried, and with None after a success.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        learner: Learner,
        progress: Progress,
        line: VersionLine,
        source: GroupSource,
        reporter: Reporter,
        compute: Executor,
        on_failure: Callable[[Failure | None], None],
    ) -> None:
        self._manager, self._learner, self._progress, self._line = manager, learner, progress, line
        self._source, self._reporter = source, reporter
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

        def save() -> Path:
            # No other session's turn comes between.
            self._reporter.sync()
            return self._manager.save(self._learner, self._progress, self._line, figure)

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
        """Report that a checkpoint could not be written for now."""
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
        await self.commit(point.step, point.trained)
        view = CheckpointView(step=point.step, version=point.version, path=str(path), at=rfc3339(time.time()))
        self._reporter.checkpoint(view)
        log.info("checkpoint is durable", extra={"step": view.step, "path": view.path})

    def close(self, below: int) -> None:
        """Note that ids below count as trained; see ``GroupSource.close``."""
        self._source.close(below)

    async def commit(self, until: int, trained: IntervalSet, steps: Sequence[int] | None = None) -> None:
        """Make steps final; see ``GroupSource.commit``."""
        await self._source.commit(until, trained, steps)

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


log = logging.getLogger(__name__)

LAST_ATTEMPTS = 10
PAUSE_SECONDS = 1.0
SETTLE_SECONDS = 3.0
MOST_INTERVALS = 1024
"""Intervals of trained ids, after which those that can come no more become one: some 30 kB of a checkpoint."""
CROWDED = "planned groups leave no room for another step's"


class CheckpointOverdue(FlotillaError):
    """The last checkpoint could not be written."""

    code, title, status = "checkpoint_overdue", "No checkpoint can be written", 507


class CheckpointPolicy:
    """Makes training durable.

    Args:
        config: when.
        writer: how.
        learner, progress, line: what.
        queue: where the plans of steps are.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        writer: CheckpointWriter,
        learner: Learner,
        progress: Progress,
        line: VersionLine,
        queue: TrainerQueue,
    ) -> None:
        self.progress, self.line = progress, line
        self._config, self._learner, self._queue = config, learner, queue
        self._writer = writer
        self._early, self._retained_bytes = 0, 0.0
        self._figures: dict[int, float] = {}
        self._seen_open: tuple[int, int] | None = None
        """A step, and the lowest id of a group that might still have been trained after it."""

    async def run(self) -> None:
        """Write what is copied, until cancelled. Errors as of ``CheckpointWriter``."""
        await self._writer.run()

    async def settled(self) -> None:
        """Wait until nothing is written beside the steps."""
        await self._writer.settled()

    async def begin(self) -> None:
        """Commit what the checkpoint that training continues from contains: a crash may have prevented it."""
        if self.progress.step:
            await self._commit()
            await retry(partial(self._queue.record, self.progress.recent), waiting_for=DATA_PLANE)
        if self.progress.closed is not None:
            self._writer.close(self.progress.closed.below)
        await self._close_ended()

    @property
    def is_durable(self) -> bool:
        """Whether the newest checkpoint contains every step."""
        return self.progress.step == self._writer.durable_step

    @property
    def _figure(self) -> float | None:
        found = [figure for step, figure in self._figures.items() if step > self._writer.durable_step]
        return fmean(found) if found else None

    @property
    def _late_steps(self) -> int:
        """Steps since a checkpoint was due; below 0 none is."""
        return self.progress.step - self._writer.reached_step - self._config.every_steps

    @property
    def _is_at_version(self) -> bool:
        return self.line.is_published(self.progress.step)

    async def after_step(self, is_stopped: Callable[[], bool], values: Mapping[str, float]) -> None:
        """Write a checkpoint if one is due: training waits until the state is copied, not until it is written.

        It waits for the whole of it where ``checkpoint.asynchronous`` is false, where memory has no room for a copy,
        and where none could be written for a whole interval. The one before is always waited for.

        Args:
            is_stopped: whether the loop shall end, which ends the wait.
            values: what is reported of the step.
        """
        if self._config.best is not None and (figure := values.get(self._config.best.metric)) is not None:
            kept = {step: each for step, each in self._figures.items() if step > self._writer.durable_step}
            self._figures = kept | {self.progress.step: figure}
        if self._config.durability == "step":
            await self._commit([self.progress.step])
        if not await self._is_due():
            return
        if self._writer.is_busy:
            await self._writer.settled()
            # It may have made room, or failed.
            if not await self._is_due():
                return
        await self._close_ended()
        late = self._late_steps
        if late < 0:
            self._tell_of_early(CROWDED)
        is_overdue = late >= self._config.every_steps
        if not is_overdue and self._config.asynchronous and await self._is_copied():
            return
        while await self._error_of_checkpoint() and is_overdue and not is_stopped():  # noqa: ASYNC110 (no disk tells of room)
            await asyncio.sleep(PAUSE_SECONDS)

    async def _is_due(self) -> bool:
        is_crowded = await self._is_crowded()
        return (self._late_steps >= 0 or is_crowded) and self._is_at_version

    async def _close_ended(self) -> None:
        """Shorten the list of what was trained where it is long, by what can come no more.

        What that was is asked some steps before: a server that came back from its log has lost fewer.
        """
        progress = self.progress
        if progress.trained.num_intervals <= MOST_INTERVALS:
            return
        if self._seen_open is not None:
            step, below = self._seen_open
            if progress.step < step + RECENT_STEPS:
                return
            progress.close(below)
            if progress.closed is not None:
                self._writer.close(progress.closed.below)
        with contextlib.suppress(Unavailable):
            are_taken = self._learner.spec.data.subscribes_to is not None
            self._seen_open = progress.step, await self._queue.lowest_open(are_taken=are_taken)

    async def _is_copied(self) -> bool:
        """Copy the state, to be written beside the next steps; False where memory is too short for that."""
        try:
            is_copied = await self._writer.copy(self._figure)
        except Unavailable as error:
            self._writer.tell_failure(error)
            return True
        if not is_copied:
            log.info("too little memory is free for a copy: training waits until the checkpoint is written")
        return is_copied

    async def _error_of_checkpoint(self) -> Unavailable | None:
        """Write a checkpoint; if that is impossible for now, report it and return why."""
        try:
            await self._writer.save(self._figure)
        except Unavailable as error:
            self._writer.tell_failure(error)
            return error
        return None

    async def at_the_end(self, *, is_over: bool, is_stopped: Callable[[], bool], publisher: Publisher) -> None:
        """Make the last step durable; between two versions only if nothing is left to publish, or no trainer continues.

        Training that has ended by itself waits until there is room, one that is to end tries for some seconds.

        Raises:
            CheckpointOverdue: it was to end, and no checkpoint could be written.
        """
        await self._writer.settled()
        if self.is_durable:
            return
        if not self._is_at_version and not is_over and not await _is_settled(publisher):
            log.info("stopped between two versions: the steps since the last checkpoint are replayed next time")
            return
        attempts = 0
        while error := await self._error_of_checkpoint():
            attempts += is_stopped()
            if attempts == LAST_ATTEMPTS:
                raise CheckpointOverdue(error.detail) from error
            await asyncio.sleep(PAUSE_SECONDS)

    async def now(self, reason: str, publisher: Publisher) -> None:
        """Write a checkpoint although none is due; one that cannot be written is left to the next occasion."""
        if self.is_durable or (not self._is_at_version and not await _is_settled(publisher)):
            return
        await self._writer.settled()
        if self.is_durable:
            return
        self._tell_of_early(reason)
        await self._error_of_checkpoint()

    def take_figures(self) -> dict[str, float]:
        """Return what a step's report tells: checkpoints made early since the last one, and what is retained."""
        early, self._early = self._early, 0
        found = {"checkpoint/early": float(early), "checkpoint/retained_bytes": self._retained_bytes}
        written = self._writer.take_write_seconds()
        return found if written is None else found | {"checkpoint/write_seconds": written}

    async def _is_crowded(self) -> bool:
        retained = await retry(self._queue.retained, waiting_for=DATA_PLANE)
        self._retained_bytes = retained.size_bytes * retained.planned / max(1, retained.entries)
        return retained.is_crowded_by(self._learner.spec.groups_per_step)

    def _tell_of_early(self, reason: str) -> None:
        self._early += 1
        log.info("a checkpoint is made early", extra={"step": self.progress.step, "reason": reason})

    async def _commit(self, steps: Sequence[int] | None = None) -> None:
        await self._writer.commit(self.progress.step, self.progress.trained, steps)


async def _is_settled(publisher: Publisher) -> bool:
    try:
        async with asyncio.timeout(SETTLE_SECONDS):
            await publisher.settled()
    except TimeoutError:
        return False
    return True
