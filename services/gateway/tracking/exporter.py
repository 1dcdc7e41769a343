"""Sends an experiment's series to one tracker, in the store's order of writing.

It reads what the store holds after the tracker's own cursor. So nothing on the way of a metric into the store knows of
trackers, a restarted gateway continues after the tracker's last record, and one that was unavailable gets all it
missed.
"""

import asyncio
import contextlib
import functools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from flotilla.services.gateway import signals
from flotilla.services.gateway.events.log import EventLog
from flotilla.services.gateway.records.repository import Experiment, document_of
from flotilla.services.gateway.store.base import MetricRow, Store
from flotilla.services.gateway.tracking.base import Record, TrackedRun, Tracker
from flotilla.services.gateway.tracking.opening import open_tracker
from flotilla.shared.clock import pause_after
from flotilla.shared.config.redaction import redacted
from flotilla.shared.errors import FlotillaError

log = logging.getLogger(__name__)

PERIOD_SECONDS = 2.0
PAGE = 5000
LONGEST_PAUSE_SECONDS = 60.0
STUCK_SECONDS = 120.0
FINISH_SECONDS = 20.0


T = TypeVar("T")


class TrackerThread:
    """Runs calls in their order. It is a daemon: a call that never returns does not keep the gateway from ending."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    async def run(self, call: Callable[[], T]) -> T:
        """Run a call after those before it; cancelling leaves one that has begun to its own end."""
        future: Future[T] = Future()
        self._calls.put((future, call))
        return await asyncio.wrap_future(future)

    def end(self) -> None:
        """Let it end after the calls that it was given."""
        self._calls.put(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except Exception as error:  # whatever a library raises belongs to whoever waits for the call
                future.set_exception(error)


class Exporter:
    """Feeds one tracker of one experiment.

    Args:
        name: of the tracker, for people.
        open_tracker: opens it where it left off; called on the tracker's own thread.
    """

    def __init__(
        self, name: str, run: TrackedRun, store: Store, events: EventLog, open_tracker: Callable[[], Tracker]
    ) -> None:
        self._name = name
        self._run = run
        self._store = store
        self._events = events
        self._open = open_tracker
        self._thread = TrackerThread(f"{name} of {run.id}")
        self._tracker: Tracker | None = None
        self._is_broken = False
        self._num_failures = 0

    async def run(self) -> None:
        """Send what is new every two seconds until cancelled; a failure is an event, and tried again later."""
        while True:
            is_well = await self._attempt()
            num_failures = 0 if is_well else self._num_failures
            await asyncio.sleep(pause_after(num_failures + 1, PERIOD_SECONDS, LONGEST_PAUSE_SECONDS))

    async def finish(self) -> None:
        """Send all that is left and close the tracker, within a deadline."""
        try:
            async with asyncio.timeout(FINISH_SECONDS):
                if await self._attempt() and self._tracker is not None:
                    await self._thread.run(self._tracker.close)
        except Exception as error:  # a tracker's library raises what it likes; training is over either way
            is_late = isinstance(error, TimeoutError)
            cause = f"it took longer than {FINISH_SECONDS:g} s to write the last values" if is_late else repr(error)
            await self._report_failure(cause)
        finally:
            self._thread.end()

    async def _attempt(self) -> bool:
        deadline = asyncio.timeout(STUCK_SECONDS)
        try:
            async with deadline:
                await self.export()
            if self._num_failures:
                await self._events.append(self._run.id, "tracker_recovered", tracker=self._name)
        except FlotillaError as error:  # the store is unavailable: no fault of the tracker
            log.warning("series could not be read", extra={"experiment_id": self._run.id, "error": repr(error)})
            return False
        except Exception as error:  # a tracker's library raises what it likes, and must not end the experiment
            is_stuck = deadline.expired()
            await self._report_failure(f"no answer within {STUCK_SECONDS:g} s" if is_stuck else repr(error))
            return False
        self._num_failures = 0
        return True

    async def export(self) -> None:
        """Send all that the tracker does not hold yet.

        Raises:
            Exception: what the tracker's library raises.
        """
        if self._is_broken or self._tracker is None:
            self._tracker = await self._thread.run(self._reopen)
            self._is_broken = False
        tracker = self._tracker
        # Asked each time: a call that was cancelled may have come to its end.
        cursor = await self._thread.run(tracker.cursor)
        while True:
            rows = await self._store.metrics(self._run.id, names=(), after=cursor, limit=PAGE)
            records = records_of(rows, is_cut=len(rows) == PAGE)
            if not records:
                return
            await self._thread.run(functools.partial(tracker.write, records))
            cursor = records[-1].cursor

    def _reopen(self) -> Tracker:
        if self._tracker is not None:
            with contextlib.suppress(Exception):  # it is broken, and closed only to give up what it holds
                self._tracker.close()
        return self._open()

    async def _report_failure(self, cause: str) -> None:
        log.warning("a tracker failed", extra={"experiment_id": self._run.id, "tracker": self._name, "error": cause})
        self._is_broken = True  # what it holds is not known, so it is opened again next time
        self._num_failures += 1
        if self._num_failures == 1:
            try:
                await self._events.append(self._run.id, "tracker_failed", tracker=self._name, cause=cause)
            except FlotillaError:
                self._num_failures = 0  # reported next time


def records_of(rows: Sequence[MetricRow], *, is_cut: bool = False) -> list[Record]:
    """Join values that were stored together, which follow each other.

    Args:
        is_cut: whether the page is full, so that the last record may not be whole: it is left for the next page.
    """
    records: list[Record] = []
    place: tuple[int, int, str | None] | None = None
    values: dict[str, float] = {}
    for cursor, point in rows:
        here = (point.step, point.version, point.at)
        if here != place or point.name in values:
            values, place = {}, here
            at = datetime.fromisoformat(point.at).timestamp() if point.at else 0.0
            records.append(Record(cursor, point.step, point.version, at, values))
        values[point.name] = point.value
        records[-1] = Record(cursor, point.step, point.version, records[-1].at, values)
    return records[:-1] if is_cut and len(records) > 1 else records


class Tracking:
    """Keeps one exporter per tracker of an experiment."""

    def __init__(self, store: Store, events: EventLog) -> None:
        self._store = store
        self._events = events
        self._exporters: dict[str, tuple[Exporter, ...]] = {}

    async def run(self, experiment: Experiment) -> None:
        """Feed the trackers until cancelled; returns at once if there is none."""
        if exporters := self._of(experiment):
            await signals.run_together(*(asyncio.create_task(each.run(), name="exporter") for each in exporters))

    async def finish(self, experiment: Experiment) -> None:
        """Send what is left, and close; within a deadline, whatever the trackers do."""
        exporters = self._of(experiment)
        del self._exporters[experiment.id]
        await asyncio.gather(*(exporter.finish() for exporter in exporters))

    def _of(self, experiment: Experiment) -> tuple[Exporter, ...]:
        if experiment.id not in self._exporters:
            record = experiment.record
            run = TrackedRun(experiment.id, record.name, Path(record.directory), redacted(document_of(record)))
            self._exporters[experiment.id] = tuple(
                Exporter(config.kind, run, self._store, self._events, functools.partial(open_tracker, config, run))
                for config in experiment.spec.tracking.trackers
            )
        return self._exporters[experiment.id]
