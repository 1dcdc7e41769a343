"""The store's twin in memory, for tests."""

from collections.abc import Mapping, Sequence
from typing import Any

from services.gateway.store.base import MetricRow
from services.gateway.store.records import AuditRecord, ExperimentRecord, PublicationRecord, ServiceRecord, StoredAnswer
from shared.clock import rfc3339
from shared.schemas.experiment import CheckpointView, Event, MetricPoint


class MemoryStore:
    """Keeps every row in dictionaries; see ``Store``."""

    def __init__(self) -> None:
        self._experiments: dict[str, ExperimentRecord] = {}
        self._services: dict[str, ServiceRecord] = {}
        self._publications: dict[tuple[str, int], PublicationRecord] = {}
        self._metrics: dict[tuple[str, str, int], MetricRow] = {}
        self._events: list[tuple[str, Event]] = []
        self._audit: list[AuditRecord] = []
        self._checkpoints: dict[tuple[str, int], CheckpointView] = {}
        self._answers: dict[str, StoredAnswer] = {}
        self._sequence = 0

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    async def ping(self) -> None:
        """Answer."""

    async def close(self) -> None:
        """Do nothing: there is nothing to give up."""

    async def put_experiment(self, record: ExperimentRecord) -> None:
        """Insert or replace by id."""
        self._experiments[record.id] = record

    async def experiments(self) -> list[ExperimentRecord]:
        """List all, oldest first."""
        return sorted(self._experiments.values(), key=lambda record: (record.created_at, record.id))

    async def delete_experiment(self, experiment_id: str) -> None:
        """Delete it with all that hangs on it; the audit trail stays."""
        self._experiments.pop(experiment_id, None)
        self._publications = {k: v for k, v in self._publications.items() if k[0] != experiment_id}
        self._metrics = {k: v for k, v in self._metrics.items() if k[0] != experiment_id}
        self._checkpoints = {k: v for k, v in self._checkpoints.items() if k[0] != experiment_id}
        self._events = [row for row in self._events if row[0] != experiment_id]

    async def put_service(self, record: ServiceRecord) -> None:
        """Insert or replace by id."""
        self._services[record.id] = record

    async def services(self) -> list[ServiceRecord]:
        """List all, oldest first."""
        return sorted(self._services.values(), key=lambda record: (record.registered_at, record.id))

    async def delete_service(self, service_id: str) -> None:
        """Delete one; deleting it again does nothing."""
        self._services.pop(service_id, None)

    async def put_publication(self, record: PublicationRecord) -> None:
        """Insert or replace by experiment and version."""
        self._publications[record.experiment_id, record.version] = record

    async def publication(self, experiment_id: str, version: int) -> PublicationRecord | None:
        """Find one."""
        return self._publications.get((experiment_id, version))

    async def publications(self, experiment_id: str) -> list[PublicationRecord]:
        """List an experiment's publications by version."""
        return [self._publications[key] for key in sorted(self._publications) if key[0] == experiment_id]

    async def put_metrics(self, experiment_id: str, points: Sequence[MetricPoint]) -> None:
        """Store points; one with the same name and step replaces the earlier one and moves to the end."""
        for point in points:
            self._metrics[experiment_id, point.name, point.step] = (self._next(), point)

    async def metrics(self, experiment_id: str, *, names: Sequence[str], after: int, limit: int) -> list[MetricRow]:
        """List up to ``limit`` points written after the cursor ``after``; no ``names`` means all."""
        rows = [row for key, row in self._metrics.items() if key[0] == experiment_id and row[0] > after]
        return sorted((row for row in rows if not names or row[1].name in names), key=lambda row: row[0])[:limit]

    async def append_event(self, experiment_id: str, kind: str, at: float, data: Mapping[str, Any]) -> Event:
        """Store an event under the next id."""
        event = event_of(self._next(), kind, at, data)
        self._events.append((experiment_id, event))
        return event

    async def events(self, experiment_id: str, *, after: int, limit: int) -> list[Event]:
        """List up to ``limit`` events with an id above ``after``."""
        return [event for owner, event in self._events if owner == experiment_id and event.id > after][:limit]

    async def append_audit(self, record: AuditRecord) -> None:
        """Store an audit record."""
        self._audit.append(record)

    async def audit(self, resource: str, *, limit: int) -> list[AuditRecord]:
        """List the newest audit records of a resource, newest first."""
        return [record for record in reversed(self._audit) if record.resource == resource][:limit]

    async def put_checkpoint(self, experiment_id: str, checkpoint: CheckpointView) -> None:
        """Insert or replace by experiment and step."""
        self._checkpoints[experiment_id, checkpoint.step] = checkpoint

    async def checkpoints(self, experiment_id: str) -> list[CheckpointView]:
        """List by step."""
        return [self._checkpoints[key] for key in sorted(self._checkpoints) if key[0] == experiment_id]

    async def put_answer(self, answer: StoredAnswer) -> None:
        """Keep the answer to an idempotency key."""
        self._answers[answer.key] = answer

    async def answer(self, key: str) -> StoredAnswer | None:
        """Find the answer to an idempotency key."""
        return self._answers.get(key)

    async def delete_answers(self, before: float) -> None:
        """Forget answers older than ``before``."""
        self._answers = {key: answer for key, answer in self._answers.items() if answer.at >= before}


def event_of(number: int, kind: str, at: float, data: Mapping[str, Any]) -> Event:
    """Make the event of a row."""
    return Event(id=number, type=kind, at=rfc3339(at), data=dict(data))
