"""The feeder: issues an experiment's tasks against its admission budget.

It alone records published versions in the data plane, always before it issues under them: the budget that a
publication frees is never filled with tasks of the version before.

While the budget admits nothing it is woken by what frees some: a publication, and a group that ends without being
trained, which the data plane announces. It also reads the ledger now and then.
"""

import asyncio
import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from flotilla.services.gateway.datasets.made import GroupMaker
from flotilla.services.gateway.feeder.admission import ADMISSION_WAIT, admitted, check_taken, groups_left
from flotilla.services.gateway.feeder.rows import RowOrder
from flotilla.services.gateway.feeder.status import FeederStatus, FullStream
from flotilla.services.gateway.records.repository import Experiment
from flotilla.services.gateway.signals import Signal, run_together, wait_for_any
from flotilla.services.gateway.store.base import Store
from flotilla.services.gateway.store.writes import PointRecord, PutMetrics, PutWindow
from flotilla.shared.clock import Clock, rfc3339
from flotilla.shared.errors import Unavailable
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.schemas.task import Task
from flotilla.shared.streams.admission import IssueResult
from flotilla.shared.streams.hop import HopName
from flotilla.shared.streams.redis.connection import is_refusal

log = logging.getLogger(__name__)

GROUP_SIZE = "rollout.group_size"
BATCH = 64
QUICK_TASKS = 16
BLOCKED_SECONDS = 0.03
"""Between two readings of the ledger without notifications, and at most with them."""
TOLD_SECONDS = 0.5
"""Between two readings with notifications: a lost notification delays the feeder no longer."""
IDLE_SECONDS = 0.5
UNAVAILABLE_BACKOFF_SECONDS = 1.0
RECORD_SECONDS = 1.0
LOW_WATERMARK = 0.7
"""A stream that was full is so until it takes less than this part of its bound."""
TIDY_SECONDS = 60.0
SILENT_SECONDS = 600.0
"""A consumer that holds nothing and was silent for so long is forgotten: every process leaves one behind."""


class Feeder:
    """Issues tasks of one experiment while it runs.

    Args:
        rows: which of them each group answers; None where another experiment's groups are taken.
        status: what an earlier task of this experiment left, and what others read.
        finished: makes groups that need no rollout; None where rollouts answer the rows.
    """

    def __init__(
        self,
        experiment: Experiment,
        rows: RowOrder | None,
        store: Store,
        clock: Clock,
        status: FeederStatus,
        finished: GroupMaker | None = None,
    ) -> None:
        self._rows = rows
        self._finished = finished
        self._experiment = experiment
        self._clock = clock
        self._store = store
        self._status = status
        self._status.refusal = None
        self._status.wait.release()
        self._admission = experiment.train.admission
        origin = experiment.record.origin
        self._first_group_id = 0 if origin is None else origin["first_group_id"]
        self._first_step = 0 if origin is None else origin["step"]
        self._next_group_id: int | None = None
        """As the last issue left it; a server that lost its tail answers the next one with its own."""
        self._recorded_version: int | None = None
        self._recorded_at = self._measured_at = -math.inf
        self._tidied_at = clock.monotonic()
        self._kept: Mapping[str, Any] | None = None
        self._ended = Signal()
        self._is_told = False
        self._num_ended = 0
        """Groups that ended since the last look."""
        self._spare: tuple[int, float] = 0, -math.inf
        """How many groups the last reading of the ledger left to issue beyond its budget, and when it was."""

    async def run(self) -> None:
        """Issue until cancelled. While the data plane is unavailable, nothing is issued and nothing is lost."""
        await run_together(asyncio.create_task(self._issue_all()), asyncio.create_task(self._follow_ends()))

    async def _follow_ends(self) -> None:
        """Subscribe to groups that end. Without notifications the ledger is polled as often as needed."""

        def ended(count: int) -> None:
            self._is_told = True
            self._num_ended += count
            self._ended.fire()

        while True:
            try:
                await self._admission.follow_ends(ended)
            except Unavailable as error:
                facts = {"experiment_id": self._experiment.id, "error": error.detail}
                log.log(
                    logging.INFO if self._is_told else logging.DEBUG, "nobody tells of groups that end", extra=facts
                )
            self._is_told = False
            self._ended.fire()
            await asyncio.sleep(UNAVAILABLE_BACKOFF_SECONDS)

    async def _issue_all(self) -> None:
        while True:
            changed, ended = self._experiment.changed.next, self._ended.next
            began = self._clock.monotonic()
            try:
                pause = await self.feed()
                self._status.refusal = None
            except Unavailable as error:
                self._status.refusal = error.detail if is_refusal(error) else None
                log.warning(
                    "data plane is unavailable", extra={"experiment_id": self._experiment.id, "error": repr(error)}
                )
                self._status.wait.release()
                await wait_for_any(UNAVAILABLE_BACKOFF_SECONDS, changed)
                continue
            if pause:
                await wait_for_any(pause, changed, ended)
                if changed.done():
                    self._spare = 0, -math.inf
                if ended.done() and not changed.done():
                    # Many end at once: they are examined together.
                    await wait_for_any(max(0.0, began + BLOCKED_SECONDS - self._clock.monotonic()), changed)
            else:
                await asyncio.sleep(0)

    async def feed(self) -> float:
        """Issue one batch, as far as the budget admits; return how long to wait before the next, in seconds."""
        version = self._experiment.record.policy_version
        now = self._clock.monotonic()
        if self._kept is None:
            self._kept = await self._store.window(self._experiment.id, ADMISSION_WAIT)
            self._status.wait.restore(self._kept)
        if (ended := self._status.wait.look(version, now)) is not None:
            self._store_wait(*ended)
        # Recorded again now and then: a server that came back from its log may have forgotten it.
        if self._recorded_version != version or now - self._recorded_at > RECORD_SECONDS:
            await self._record(version, now)
        if now - self._tidied_at > TIDY_SECONDS:
            self._tidied_at = now
            for plane in (self._experiment.train, self._experiment.evaluation):
                await plane.admission.forget_consumers(SILENT_SECONDS)
        count, self._num_ended = self._num_ended, 0
        if 0 < count < self._spare[0] and now - self._spare[1] < TOLD_SECONDS and self._is_running_at(version):
            return await self._replace(count, version, now)
        self._spare = 0, -math.inf
        ledger = await self._experiment.train.ledger()
        self._status.ledger = ledger
        if self._experiment.state is not ExperimentState.RUNNING:
            return IDLE_SECONDS
        return await self._supply(version, now)

    async def _supply(self, version: int, now: float) -> float:
        """Issue what the budget admits; return how long to wait, in seconds."""
        ledger = self._status.ledger
        assert self._rows is not None and ledger is not None
        # A changed threshold has its effect with the bound on lag that the trainer derives from it.
        spec = self._experiment.steering.in_force
        steps, size = spec.optimisation.steps - self._first_step, spec.groups_per_step
        if self._finished is not None:
            # What no policy sampled does not get old, however many steps a version has.
            ledger = ledger.model_copy(update={"consumed_since_publication": 0})
            check_taken(ledger, len(self._rows.dataset.rows))
        redundant = spec.asynchrony.redundant_groups if self._finished is None else 0
        budget = spec.admission_budget
        room = admitted(ledger, budget=budget, steps=steps, groups_per_step=size, redundant=redundant)
        left = groups_left(ledger, steps=steps, groups_per_step=size) if self._finished is None else 0
        if room == 0:
            if left:
                self._status.wait.hold(now)
            self._spare = left, now
            return self._blocked_seconds()
        # A server that has lost everything receives the beginning again before anything is issued.
        first = max(self._first_group_id, await self._next_group())
        await self._rows.settle(first)
        limit = max(budget, ledger.outstanding + ledger.consumed_since_publication + room)
        result = await self._issue(range(first, first + min(room, BATCH)), version, limit)
        self._next_group_id = result.next_group_id
        if result.count:
            self._status.issued.add(first, now)
        if result.count == room:
            self._spare = left - room, now
        return self._pause_after(result.count, room, left)

    async def _record(self, version: int, now: float) -> None:
        """Record the version, from where ids begin, and what the streams may take; read the ledger next."""
        self._spare = 0, -math.inf
        if self._first_group_id:
            await self._admission.begin_at(self._first_group_id)
        await self._admission.published(version)
        # Not with each version as well: the streams do not grow by it.
        if now - self._measured_at > RECORD_SECONDS:
            self._measured_at = now
            await self._measure()
        if (window := self._status.wait.to_window()) != self._kept:
            self._store.write_soon(PutWindow(self._experiment.id, ADMISSION_WAIT, window))
            self._kept = window
        self._recorded_version, self._recorded_at = version, now

    def _is_running_at(self, version: int) -> bool:
        is_same = self._recorded_version == version and self._blocked_seconds() == TOLD_SECONDS
        return is_same and self._experiment.state is ExperimentState.RUNNING

    async def _replace(self, count: int, version: int, now: float) -> float:
        """Issue a group for each that ended without reading the ledger: the script bounds them, the end is far."""
        assert self._rows is not None
        self._spare = self._spare[0] - count, self._spare[1]
        first = max(self._first_group_id, await self._next_group())
        await self._rows.settle(first)
        limit = self._experiment.steering.in_force.admission_budget
        result = await self._issue(range(first, first + min(count, BATCH)), version, limit)
        self._next_group_id = result.next_group_id
        if result.count:
            self._status.issued.add(first, now)
        self._status.wait.hold(self._clock.monotonic())
        if result.count == count:
            return self._blocked_seconds()
        # Of some of them the last look knew already, or there is another cause: that is in the ledger.
        self._spare = 0, -math.inf
        return BLOCKED_SECONDS

    def _pause_after(self, count: int, room: int, left: int) -> float:
        """Return how long to wait after so many groups were issued of those that were admitted, and of those left."""
        if not count:
            return BLOCKED_SECONDS
        if count < room or self._experiment.spec.asynchrony.redundant_groups:
            return 0.0
        if count < left:
            # Known without another look: all that the budget admitted was issued.
            self._status.wait.hold(self._clock.monotonic())
        return self._blocked_seconds()

    def _blocked_seconds(self) -> float:
        """Return how long to wait for room. Nothing announces room that depends on more than ended groups."""
        spec = self._experiment.spec
        depends = self._finished is not None or spec.asynchrony.redundant_groups or spec.shares_devices
        return TOLD_SECONDS if self._is_told and not depends else BLOCKED_SECONDS

    async def _next_group(self) -> int:
        if self._next_group_id is None:
            self._next_group_id = await self._admission.next_group_id()
        return self._next_group_id

    async def _issue(self, group_ids: range, version: int, limit: int) -> IssueResult:
        finished, rows = self._finished, self._rows
        assert rows is not None
        if finished is None:
            # What may change is read before, on the loop that changes it.
            settings = self._experiment.steering.settings
            size = settings.get(GROUP_SIZE, self._experiment.spec.rollout.group_size)
            make = partial(self._tasks, group_ids, version, settings, size)
            # Else in a thread: the order of a new epoch of a large dataset takes seconds, and other experiments share
            # this loop. A thread takes longer to wake than a few tasks to make.
            is_quick = len(group_ids) <= QUICK_TASKS and rows.dataset.is_quick
            return await self._admission.issue_many(make() if is_quick else await asyncio.to_thread(make), limit=limit)
        now, dataset = self._clock.now(), rows.dataset
        groups = await asyncio.to_thread(lambda: finished.groups(dataset, group_ids, issued_at=now))
        return await self._admission.issue_groups(groups, hop=HopName.SCORED, limit=limit)

    def _store_wait(self, version: int, seconds: float) -> None:
        # The step that ended with the next publication, to which the trainer's figures of this version belong.
        step = self._experiment.record.published_step
        at = rfc3339(self._clock.now())
        point = PointRecord(name=ADMISSION_WAIT, step=step, version=version, value=seconds, at=at)
        window = self._status.wait.to_window()
        window_write = PutWindow(self._experiment.id, ADMISSION_WAIT, window)
        # Not awaited: the budget that the publication has freed is filled meanwhile.
        self._store.write_soon(PutMetrics(self._experiment.id, [point]), window_write)
        self._kept = window

    async def _measure(self) -> None:
        """Set the bound on the streams' memory, which may have changed, and note which stream has reached it."""
        bound = self._experiment.spec.resources.stream_bytes
        sizes = await self._admission.bound(bound)
        # Reported until there is real room again, so that a stream that its claimers keep full is one event, not many.
        limit = bound if self._status.full_stream is None else LOW_WATERMARK * bound
        full = [FullStream(hop, bound) for hop, size in sizes.items() if size > limit]
        self._status.full_stream = full[0] if full else None

    def _tasks(self, group_ids: range, version: int, settings: Mapping[str, Any], size: int) -> list[Task]:
        assert self._rows is not None
        now = self._clock.now()
        make = partial(self._rows.dataset.task, group_size=size, min_version=version, issued_at=now)
        return [replace(make(group_id), settings=settings) for group_id in group_ids]
