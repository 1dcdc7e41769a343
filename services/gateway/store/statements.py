"""How each write is done in SQL, within a transaction that ``SqlStore`` began."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from enum import StrEnum
from functools import cache
from typing import Any, Final, assert_never

import sqlalchemy as sa
from sqlalchemy import Column, Connection, Table

from flotilla.services.gateway.store import tables
from flotilla.services.gateway.store.memory import event_of
from flotilla.services.gateway.store.records import (
    ExperimentRecord,
    PublicationRecord,
    ServiceRecord,
    StoredAnswer,
    TokenRecord,
)
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
from flotilla.shared.schemas.experiment import Event

TABLES: Mapping[type[Record], Table] = {
    ExperimentRecord: tables.experiments,
    ServiceRecord: tables.services,
    PublicationRecord: tables.publications,
    TokenRecord: tables.tokens,
    StoredAnswer: tables.idempotency,
}
ONE_VALUE = (tables.metrics.c.experiment_id, tables.metrics.c.name, tables.metrics.c.step)
"""No two rows of metrics have the same."""
OF_EXPERIMENTS: Final = (
    tables.publications,
    tables.metrics,
    tables.events,
    tables.checkpoints,
    tables.windows,
    tables.webhook_deliveries,
)
"""Tables whose rows go with their experiment."""


def do_write(connection: Connection, write: Write) -> Event | None:
    """Do one write of a transaction; return its event, if it is one."""
    match write:
        case PutRecord(record):
            put_row(connection, TABLES[type(record)], row_of(record))
        case DeleteRecord(kind, key):
            connection.execute(sa.delete(TABLES[kind]).where(TABLES[kind].c.id == key))
        case DeleteExperiment(experiment_id):
            for table in OF_EXPERIMENTS:
                connection.execute(sa.delete(table).where(table.c.experiment_id == experiment_id))
            connection.execute(sa.delete(tables.experiments).where(tables.experiments.c.id == experiment_id))
        case PutMetrics(experiment_id, points):
            _put_metrics(connection, experiment_id, points)
        case AppendEvent(experiment_id, kind, at, data):
            row = {"experiment_id": experiment_id, "type": kind, "at": at, "data": dict(data)}
            made = connection.execute(sa.insert(tables.events).values(row)).inserted_primary_key
            assert made is not None
            return event_of(int(made[0]), kind, at, data)
        case AppendAudit(audit):
            connection.execute(sa.insert(tables.audit).values(row_of(audit)))
        case PutCheckpoint(experiment_id, checkpoint):
            put_row(connection, tables.checkpoints, {"experiment_id": experiment_id, **checkpoint.model_dump()})
        case DeleteCheckpoints(experiment_id, after):
            table = tables.checkpoints
            connection.execute(sa.delete(table).where(table.c.experiment_id == experiment_id, table.c.step > after))
        case PutWindow(experiment_id, name, data):
            put_row(connection, tables.windows, {"experiment_id": experiment_id, "name": name, "data": _plain(data)})
        case DeleteAnswers(before):
            connection.execute(sa.delete(tables.idempotency).where(tables.idempotency.c.at < before))
        case QueueDelivery(delivery):
            connection.execute(_insertion(tables.webhook_deliveries), row_of(delivery))
        case DeleteDeliveries(message_ids):
            ids = tables.webhook_deliveries.c.message_id
            connection.execute(sa.delete(tables.webhook_deliveries).where(ids.in_(list(message_ids))))
        case _:
            assert_never(write)
    return None


def _put_metrics(connection: Connection, experiment_id: str, points: Sequence[PointRecord]) -> None:
    # The last of two equal keys in one batch wins, as it would in two batches.
    newest = {(point.name, point.step): point for point in points}
    rows = [{"experiment_id": experiment_id, **point._asdict()} for point in newest.values()]
    if rows:
        connection.execute(_deletion_of_metrics(), [_key_of(ONE_VALUE, row) for row in rows])
        connection.execute(_insertion(tables.metrics), rows)


def row_of(record: Any) -> dict[str, Any]:
    """Make the row of a record: its fields, states as plain text, mappings as plain dictionaries."""
    return {field.name: _plain(getattr(record, field.name)) for field in fields(record)}


def _plain(value: Any) -> Any:
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def put_row(connection: Connection, table: Table, row: Mapping[str, Any]) -> None:
    key = _key_of(table.primary_key, row)
    if connection.execute(_update(table), {**row, **key}).rowcount == 0:
        connection.execute(_insertion(table), dict(row))


# Made once each: to put a statement together takes longer than the database does for it.


@cache
def _update(table: Table) -> sa.Update:
    return sa.update(table).where(*_is_the_row(table.primary_key))


@cache
def _deletion_of_metrics() -> sa.Delete:
    return sa.delete(tables.metrics).where(*_is_the_row(ONE_VALUE))


@cache
def _insertion(table: Table) -> sa.Insert:
    return sa.insert(table)


def _is_the_row(key: Iterable[Column[Any]]) -> list[sa.ColumnElement[bool]]:
    return [column == sa.bindparam(f"key_{column.name}", type_=column.type) for column in key]


def _key_of(key: Iterable[Column[Any]], row: Mapping[str, Any]) -> dict[str, Any]:
    return {f"key_{column.name}": row[column.name] for column in key}
