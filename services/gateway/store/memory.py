"""The store's twin in memory, for tests."""

import json
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, assert_never

from flotilla.services.gateway.store.base import MetricRow
from flotilla.services.gateway.store.records import (
    AuditRecord,
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
    DeleteExperiment,
    DeleteRecord,
    PutCheckpoint,
    PutMetrics,
    PutRecord,
    PutWindow,
    Record,
    Write,
)
from flotilla.shared.clock import rfc3339
from flotilla.shared.schemas.experiment import CheckpointView, Event


class MemoryStore(TransactionalStore):
    """Keeps every row in dictionaries; see ``Store``."""

    def __init__(self) -> None:
        super().__init__()
        self._experiments: dict[str, ExperimentRecord] = {}
        self._services: dict[str, ServiceRecord] = {}
        self._publications: dict[tuple[str, int], PublicationRecord] = {}
        self._metrics: dict[tuple[str, str, int], MetricRow] = {}
        self._events: list[tuple[str, Event]] = []
        self._audit: list[AuditRecord] = []
        self._checkpoints: dict[tuple[str, int], CheckpointView] = {}
        self._windows: dict[tuple[str, str], str] = {}
        self._answers: dict[str, StoredAnswer] = {}
        self._tokens: dict[str, TokenRecord] = {}
        self._sequence = 0

    async def apply(self, writes: Sequence[Write]) -> list[Event]:
        """Store all of them or none; return the events among them."""
        before = {name: copy(value) for name, value in vars(self).items() if isinstance(value, dict | list)}
        try:
            return [event for write in writes if (event := self.do(write)) is not None]
        except BaseException:
            # Only the numbers go on: like a database's, they never come back.
            vars(self).update(before)
            raise

    def do(self, write: Write) -> Event | None:
        """Do one write of a transaction; return its event, if it is one."""
        match write:
            case PutRecord(record):
                self._put(record)
            case DeleteRecord(kind, key):
                (self._services if kind is ServiceRecord else self._tokens).pop(key, None)
            case DeleteExperiment(experiment_id):
                self._delete_experiment(experiment_id)
            case PutMetrics(experiment_id, points):
                for point in points:
                    self._metrics[experiment_id, point.name, point.step] = (self._next(), point)
            case AppendEvent(experiment_id, kind, at, data):
                event = event_of(self._next(), kind, at, data)
                self._events.append((experiment_id, event))
                return event
            case AppendAudit(audit):
                self._audit.append(audit)
            case PutCheckpoint(experiment_id, checkpoint):
                self._checkpoints[experiment_id, checkpoint.step] = checkpoint
            case DeleteCheckpoints(experiment_id, after):
                self._delete_checkpoints(experiment_id, after)
            case PutWindow(experiment_id, name, data):
                # As JSON, like the database: what differs after a restart differs here.
                self._windows[experiment_id, name] = json.dumps(data)
            case DeleteAnswers(earliest):
                self._answers = {key: answer for key, answer in self._answers.items() if answer.at >= earliest}
            case _:
                assert_never(write)
        return None

    def _put(self, record: Record) -> None:
        match record:
            case ExperimentRecord():
                self._experiments[record.id] = record
            case ServiceRecord():
                self._services[record.id] = record
            case PublicationRecord():
                self._publications[record.experiment_id, record.version] = record
            case TokenRecord():
                self._tokens[record.id] = record
            case StoredAnswer():
                self._answers[record.key] = record

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    def _delete_checkpoints(self, experiment_id: str, after: int) -> None:
        later = [key for key in self._checkpoints if key[0] == experiment_id and key[1] > after]
        self._checkpoints = {key: view for key, view in self._checkpoints.items() if key not in later}

    def _delete_experiment(self, experiment_id: str) -> None:
        self._experiments.pop(experiment_id, None)
        self._publications = {k: v for k, v in self._publications.items() if k[0] != experiment_id}
        self._metrics = {k: v for k, v in self._metrics.items() if k[0] != experiment_id}
        self._checkpoints = {k: v for k, v in self._checkpoints.items() if k[0] != experiment_id}
        self._windows = {k: v for k, v in self._windows.items() if k[0] != experiment_id}
        self._events = [row for row in self._events if row[0] != experiment_id]

    async def ping(self) -> None:
        """Answer."""

    async def close(self) -> None:
        """Do nothing: there is nothing to give up."""

    async def experiments(self) -> list[ExperimentRecord]:
        """List all, oldest first."""
        return sorted(self._experiments.values(), key=lambda record: (record.number, record.created_at, record.id))

    async def services(self) -> list[ServiceRecord]:
        """List all, oldest first."""
        return sorted(self._services.values(), key=lambda record: (record.number, record.registered_at, record.id))

    async def window(self, experiment_id: str, name: str) -> Mapping[str, Any]:
        """Find a measurement that had not ended; empty if there is none."""
        found: Mapping[str, Any] = json.loads(self._windows.get((experiment_id, name), "{}"))
        return found

    async def publication(self, experiment_id: str, version: int) -> PublicationRecord | None:
        """Find one."""
        return self._publications.get((experiment_id, version))

    async def publications(self, experiment_id: str) -> list[PublicationRecord]:
        """List an experiment's publications by version."""
        return [self._publications[key] for key in sorted(self._publications) if key[0] == experiment_id]

    async def metrics(self, experiment_id: str, *, names: Sequence[str], after: int, limit: int) -> list[MetricRow]:
        """List up to ``limit`` points written after the cursor ``after``; no ``names`` means all."""
        begins = tuple(name[:-1] for name in names if name.endswith("*"))
        rows = [row for key, row in self._metrics.items() if key[0] == experiment_id and row[0] > after]
        found = (row for row in rows if not names or row[1].name in names or row[1].name.startswith(begins))
        return sorted(found, key=lambda row: row[0])[:limit]

    async def metric_names(self, experiment_id: str) -> set[str]:
        """List the names that an experiment has points of."""
        return {name for owner, name, _ in self._metrics if owner == experiment_id}

    async def events(self, experiment_id: str, *, after: int, limit: int) -> list[Event]:
        """List up to ``limit`` events with an id above ``after``."""
        return [event for owner, event in self._events if owner == experiment_id and event.id > after][:limit]

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


def event_of(number: int, kind: str, at: float, data: Mapping[str, Any]) -> Event:
    """Make the event of a row."""
    return Event(id=number, type=kind, at=rfc3339(at), data=dict(data))
