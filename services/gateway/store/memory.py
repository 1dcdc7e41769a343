"""The store's twin in memory: for tests, and for what runs have left (``recorded.py``).

A transaction that fails is undone change by change, the last one first.
"""

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any, TypeVar, assert_never

from flotilla.services.gateway.store.base import MetricRow
from flotilla.services.gateway.store.records import (
    AuditRecord,
    DeliveryRecord,
    ExperimentRecord,
    PublicationRecord,
    ServiceRecord,
    StoredAnswer,
    TokenRecord,
)
from flotilla.services.gateway.store.transaction import TransactionalStore
from flotilla.services.gateway.store.writes import (
    AppendAudit,
    AppendEvent,
    DeleteAnswers,
    DeleteCheckpoints,
    DeleteDeliveries,
    DeleteExperiment,
    DeleteRecord,
    PointRecord,
    PutCheckpoint,
    PutMetrics,
    PutRecord,
    PutWindow,
    QueueDelivery,
    Record,
    Write,
)
from flotilla.shared.clock import rfc3339
from flotilla.shared.schemas.experiment import CheckpointView, Event

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
Undo = Callable[[], object]


class Series:
    """The points of one experiment in the order of writing; of one name and step the last.

    A point that was replaced leaves a gap, so that pages are found by bisection. Gaps are closed once they are the
    larger part.
    """

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._points: list[PointRecord | None] = []
        self._places: dict[tuple[str, int], int] = {}

    def put(self, number: int, point: PointRecord) -> Undo:
        """Add a point under a number above all others; return what takes it back, while it is the last."""
        key = (point.name, point.step)
        before = self._places.get(key)
        replaced = None if before is None else self._points[before]
        if before is not None:
            self._points[before] = None
        self._places[key] = len(self._points)
        self._numbers.append(number)
        self._points.append(point)

        def undo() -> None:
            self._numbers.pop()
            self._points.pop()
            if before is None:
                del self._places[key]
            else:
                self._places[key] = before
                self._points[before] = replaced

        return undo

    def close_gaps(self) -> None:
        """Forget the gaps if they are the larger part. No change of before can be taken back after this."""
        if len(self._points) > 2 * len(self._places):
            kept = list(self.after(0))
            self._numbers, self._points = [number for number, _ in kept], [point for _, point in kept]
            self._places = {(point.name, point.step): place for place, (_, point) in enumerate(kept)}

    def after(self, number: int) -> Iterator[MetricRow]:
        """Go through the points whose number is larger."""
        for place in range(bisect_right(self._numbers, number), len(self._numbers)):
            if (point := self._points[place]) is not None:
                yield self._numbers[place], point

    def names(self) -> set[str]:
        """Return the names of its points."""
        return {name for name, _ in self._places}


class MemoryStore(TransactionalStore):
    """Keeps every row in dictionaries; see ``Store``."""

    def __init__(self) -> None:
        super().__init__()
        self._experiments: dict[str, ExperimentRecord] = {}
        self._services: dict[str, ServiceRecord] = {}
        self._publications: dict[tuple[str, int], PublicationRecord] = {}
        self._metrics: defaultdict[str, Series] = defaultdict(Series)
        self._events: defaultdict[str, list[Event]] = defaultdict(list)
        self._audit: list[AuditRecord] = []
        self._checkpoints: dict[tuple[str, int], CheckpointView] = {}
        self._windows: dict[tuple[str, str], str] = {}
        self._answers: dict[str, StoredAnswer] = {}
        self._tokens: dict[str, TokenRecord] = {}
        self._deliveries: dict[int, DeliveryRecord] = {}
        self._sequence = 0
        self._undo: list[Undo] = []
        """What takes back the changes of the transaction under way."""

    async def apply(self, writes: Sequence[Write]) -> list[Event]:
        """Store all of them or none; return the events among them."""
        try:
            events = [event for write in writes if (event := self.do(write)) is not None]
        except BaseException:
            # Only the numbers continue: like a database's, they never come back.
            while self._undo:
                self._undo.pop()()
            raise
        self._undo.clear()
        for changed in {write.experiment_id for write in writes if isinstance(write, PutMetrics)}:
            self._metrics[changed].close_gaps()
        return events

    def do(self, write: Write) -> Event | None:
        """Do one write of a transaction; return its event, if it is one."""
        match write:
            case PutRecord(record):
                self._put(record)
            case DeleteRecord(kind, key):
                self._remove(self._services if kind is ServiceRecord else self._tokens, lambda each: each == key)
            case DeleteExperiment(experiment_id):
                self._delete_experiment(experiment_id)
            case PutMetrics(experiment_id, points):
                for point in points:
                    self._undo.append(self._metrics[experiment_id].put(self._next(), point))
            case AppendEvent(experiment_id, kind, at, data):
                event = event_of(self._next(), kind, at, data)
                self._append(self._events[experiment_id], event)
                return event
            case AppendAudit(audit):
                self._append(self._audit, audit)
            case PutCheckpoint(experiment_id, checkpoint):
                self._set(self._checkpoints, (experiment_id, checkpoint.step), checkpoint)
            case DeleteCheckpoints(experiment_id, after):
                self._remove(self._checkpoints, lambda key: key[0] == experiment_id and key[1] > after)
            case PutWindow(experiment_id, name, data):
                # As JSON, like the database: what differs after a restart differs here.
                self._set(self._windows, (experiment_id, name), json.dumps(data))
            case DeleteAnswers(earliest):
                self._remove(self._answers, lambda key: self._answers[key].at < earliest)
            case QueueDelivery(delivery):
                self._set(self._deliveries, self._next(), delivery)
            case DeleteDeliveries(message_ids):
                self._remove(self._deliveries, lambda key: self._deliveries[key].message_id in message_ids)
            case _:
                assert_never(write)
        return None

    def _put(self, record: Record) -> None:
        match record:
            case ExperimentRecord():
                self._set(self._experiments, record.id, record)
            case ServiceRecord():
                self._set(self._services, record.id, record)
            case PublicationRecord():
                self._set(self._publications, (record.experiment_id, record.version), record)
            case TokenRecord():
                self._set(self._tokens, record.id, record)
            case StoredAnswer():
                self._set(self._answers, record.key, record)

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    def _set(self, rows: dict[Key, Value], key: Key, value: Value) -> None:
        before = {key: rows[key]} if key in rows else {}
        rows[key] = value

        def undo() -> None:
            del rows[key]
            rows.update(before)

        self._undo.append(undo)

    def _append(self, rows: list[Value], value: Value) -> None:
        rows.append(value)
        self._undo.append(rows.pop)

    def _remove(self, rows: dict[Key, Any], is_meant: Callable[[Key], bool]) -> None:
        removed = {key: value for key, value in rows.items() if is_meant(key)}
        for key in removed:
            del rows[key]
        self._undo.append(lambda: rows.update(removed))

    def _delete_experiment(self, experiment_id: str) -> None:
        self._remove(self._experiments, lambda key: key == experiment_id)
        self._remove(self._publications, lambda key: key[0] == experiment_id)
        self._remove(self._metrics, lambda key: key == experiment_id)
        self._remove(self._checkpoints, lambda key: key[0] == experiment_id)
        self._remove(self._windows, lambda key: key[0] == experiment_id)
        self._remove(self._events, lambda key: key == experiment_id)
        self._remove(self._deliveries, lambda key: self._deliveries[key].experiment_id == experiment_id)

    async def ping(self) -> None:
        """Answer."""

    async def close(self) -> None:
        """Store what waits."""
        await self._end_waiting()

    async def experiments(self) -> list[ExperimentRecord]:
        """List all, oldest first."""
        return sorted(self._experiments.values(), key=lambda record: (record.number, record.created_at, record.id))

    async def services(self) -> list[ServiceRecord]:
        """List all, oldest first."""
        return sorted(self._services.values(), key=lambda record: (record.number, record.registered_at, record.id))

    async def window(self, experiment_id: str, name: str) -> Mapping[str, Any]:
        """Find a measurement that had not ended; empty if there is none."""
        await self.store_waiting()
        found: Mapping[str, Any] = json.loads(self._windows.get((experiment_id, name), "{}"))
        return found

    async def publication(self, experiment_id: str, version: int) -> PublicationRecord | None:
        """Find one."""
        return self._publications.get((experiment_id, version))

    async def publications(self, experiment_id: str, *, live_at: int | None = None) -> list[PublicationRecord]:
        """List an experiment's publications by version."""
        records = [self._publications[key] for key in sorted(self._publications) if key[0] == experiment_id]
        if live_at is None:
            return records
        last = max(records, key=lambda each: (each.epoch, each.version), default=None)
        return [each for each in records if each is last or each.ended_at is None or each.version == live_at]

    async def metrics(self, experiment_id: str, *, names: Sequence[str], after: int, limit: int) -> list[MetricRow]:
        """List up to ``limit`` points written after the cursor ``after``; no ``names`` means all."""
        await self.store_waiting()
        exact, begins = frozenset(names), tuple(name[:-1] for name in names if name.endswith("*"))
        rows = self._metrics[experiment_id].after(after) if experiment_id in self._metrics else iter(())

        @cache  # rows are many and names are few
        def is_wanted(name: str) -> bool:
            return not names or name in exact or name.startswith(begins)

        found = (row for row in rows if is_wanted(row[1].name))
        return list(islice(found, limit))

    async def metric_names(self, experiment_id: str) -> set[str]:
        """List the names that an experiment has points of."""
        await self.store_waiting()
        return self._metrics[experiment_id].names() if experiment_id in self._metrics else set()

    async def events(self, experiment_id: str, *, after: int, limit: int, types: Collection[str] = ()) -> list[Event]:
        """List up to ``limit`` events with an id above ``after``, of some types or of all."""
        await self.store_waiting()
        events = self._events.get(experiment_id, [])
        first = bisect_right(events, after, key=lambda event: event.id)
        if not types:
            return events[first : first + limit]
        return list(islice((event for event in islice(events, first, None) if event.type in types), limit))

    async def audit(self, resource: str, *, limit: int) -> list[AuditRecord]:
        """List the newest audit records of a resource, newest first."""
        return [record for record in reversed(self._audit) if record.resource == resource][:limit]

    async def checkpoints(self, experiment_id: str) -> list[CheckpointView]:
        """List by step."""
        return [self._checkpoints[key] for key in sorted(self._checkpoints) if key[0] == experiment_id]

    async def tokens(self) -> list[TokenRecord]:
        """List all, oldest first."""
        return sorted(self._tokens.values(), key=lambda token: (token.created_at, token.id))

    async def answer(self, key: str) -> StoredAnswer | None:
        """Find the answer to an idempotency key."""
        return self._answers.get(key)

    async def deliveries(self) -> list[DeliveryRecord]:
        """List what waits to be sent to web hooks, in the order of the events."""
        return [self._deliveries[number] for number in sorted(self._deliveries)]


def event_of(number: int, kind: str, at: float, data: Mapping[str, Any]) -> Event:
    """Make the event of a row."""
    return Event(id=number, type=kind, at=rfc3339(at), data=dict(data))
