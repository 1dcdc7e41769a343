"""How changes become rows: one function for each kind of write, and statements that are put together once.

To put a statement together, and to make columns of values, takes longer than the database does for it. An experiment's
record has its whole spec and changes several times in each step, in a number or two, and a publication's has its whole
manifest: only what has changed of them is written.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from enum import StrEnum
from functools import cache
from typing import Any, Final, assert_never

import sqlalchemy as sa
from sqlalchemy import Column, Connection, Dialect, Table
from sqlalchemy.dialects import postgresql, sqlite

from flotilla.services.gateway.store import tables
from flotilla.services.gateway.store.direct import DirectConnection
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

TABLES: Final[Mapping[type[Record], Table]] = {
    ExperimentRecord: tables.experiments,
    ServiceRecord: tables.services,
    PublicationRecord: tables.publications,
    TokenRecord: tables.tokens,
    StoredAnswer: tables.idempotency,
}
Large = ExperimentRecord | PublicationRecord
"""Records of which only what has changed is written."""
Whose = tuple[type[Large], str]
"""A kind of record, and the experiment that it is of."""
Writing = Connection | DirectConnection
ONE_VALUE: Final = (tables.metrics.c.experiment_id, tables.metrics.c.step, tables.metrics.c.name)
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


class RowWriter:
    """Writes the rows of transactions, one after the other, of one database that nobody else writes to meanwhile."""

    def __init__(self) -> None:
        self._stored: dict[Whose, Large] = {}
        """What the database has of each experiment and of its last publication, as far as this has written it."""
        self._staged: dict[Whose, Large | None] = {}

    def write(self, connection: Writing, writes: Sequence[Write]) -> list[Event]:
        """Write all within the connection's transaction; return the events among them."""
        self._staged = {}
        return [event for write in writes if (event := self._do(connection, write)) is not None]

    def are_stored(self) -> None:
        """Note that the transaction of the last ``write`` was committed."""
        for whose, record in self._staged.items():
            self._stored.pop(whose, None)
            if record is not None:
                self._stored[whose] = record
        self._staged = {}

    def _do(self, connection: Writing, write: Write) -> Event | None:
        """Do one write of a transaction; return its event, if it is one."""
        match write:
            case PutRecord(record):
                self._put_record(connection, record)
            case DeleteRecord(kind, key):
                connection.execute(sa.delete(TABLES[kind]).where(TABLES[kind].c.id == key))
            case DeleteExperiment(experiment_id):
                for table in OF_EXPERIMENTS:
                    connection.execute(sa.delete(table).where(table.c.experiment_id == experiment_id))
                connection.execute(sa.delete(tables.experiments).where(tables.experiments.c.id == experiment_id))
                self._staged |= {(kind, experiment_id): None for kind in (ExperimentRecord, PublicationRecord)}
            case PutMetrics(experiment_id, points):
                _put_metrics(connection, experiment_id, points)
            case AppendEvent(experiment_id, kind, at, data):
                row = {"experiment_id": experiment_id, "type": kind, "at": at, "data": data}
                made = connection.execute(_insertion(tables.events), row).inserted_primary_key
                assert made is not None
                return event_of(int(made[0]), kind, at, data)
            case AppendAudit(audit):
                connection.execute(_insertion(tables.audit), row_of(audit))
            case PutCheckpoint(experiment_id, checkpoint):
                put_row(connection, tables.checkpoints, {"experiment_id": experiment_id, **checkpoint.model_dump()})
            case DeleteCheckpoints(experiment_id, after):
                table = tables.checkpoints
                connection.execute(sa.delete(table).where(table.c.experiment_id == experiment_id, table.c.step > after))
            case PutWindow(experiment_id, name, data):
                put_row(connection, tables.windows, {"experiment_id": experiment_id, "name": name, "data": data})
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

    def _put_record(self, connection: Writing, record: Record) -> None:
        table = TABLES[type(record)]
        if not isinstance(record, Large):
            put_row(connection, table, row_of(record))
            return
        whose: Whose = type(record), record.id if isinstance(record, ExperimentRecord) else record.experiment_id
        key = {f"key_{column.name}": getattr(record, column.name) for column in table.primary_key}
        known = self._staged.get(whose, self._stored.get(whose))
        if known is not None and any(getattr(known, name.removeprefix("key_")) != each for name, each in key.items()):
            known = None  # of another version
        changes = row_of(record, since=known)
        if known is None:
            put_row(connection, table, changes)
        elif changes:
            connection.execute(_update(table), {**changes, **key})
        self._staged[whose] = record


def put_row(connection: Writing, table: Table, row: Mapping[str, Any]) -> None:
    """Replace the row of the same primary key, or insert it; ``row`` has a value for every column."""
    connection.execute(_replacement(table, connection.dialect.name), dict(row))


def one_row(table: Table) -> sa.Select[Any]:
    """Ask for the row of a primary key, whose values are parameters with the columns' names."""
    return sa.select(table).where(*(each == sa.bindparam(each.name, type_=each.type) for each in table.primary_key))


def row_of(record: Any, since: Any = None) -> dict[str, Any]:
    """Make the row of a record: its fields, states as plain text.

    Args:
        record: a data class.
        since: an earlier one of the same row: only the fields that differ are returned.
    """
    names = [field.name for field in fields(record)]
    if since is not None:
        names = [name for name in names if _differ(getattr(record, name), getattr(since, name))]
    return {name: _plain(getattr(record, name)) for name in names}


def _differ(one: object, other: object) -> bool:
    """Whether a field has to be written: equal is not the same where the types differ, as of 1, 1.0 and True.

    Documents are told apart by identity: to compare them value by value, with the types, takes longer than to write.
    """
    if one is other:
        return False
    is_plain = isinstance(one, str | int | float | None) and type(one) is type(other)
    return not is_plain or one != other


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, StrEnum) else value


def document(value: Any) -> str:
    """Write what a column of documents holds as JSON, mappings of any kind among it."""
    return _DOCUMENTS.encode(value)


def _mapping(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a document holds plain values, got {type(value).__name__}")


_DOCUMENTS: Final = json.JSONEncoder(default=_mapping)


def _put_metrics(connection: Writing, experiment_id: str, points: Sequence[PointRecord]) -> None:
    # The last of two equal keys in one batch wins, as it would in two batches.
    newest = {(point.name, point.step): point for point in points}
    if not newest:
        return
    if isinstance(connection, DirectConnection):
        # One statement in place of two; what it replaces it deletes, and the new row has the next number.
        text = _replacement_of_metrics(connection.dialect)
        connection.exec_driver_sql(text, [(experiment_id, *point) for point in newest.values()])
        return
    rows = [{"experiment_id": experiment_id, **point._asdict()} for point in newest.values()]
    connection.execute(_deletion_of_metrics(), [_key_of(ONE_VALUE, row) for row in rows])
    connection.execute(_insertion(tables.metrics), rows)


@cache
def _replacement_of_metrics(dialect: Dialect) -> str:
    """Compile the statement for SQLite, which takes an experiment's id and the fields of a point, in order."""
    names = ("experiment_id", *PointRecord._fields)
    made = sa.insert(tables.metrics).prefix_with("OR REPLACE").values({name: sa.bindparam(name) for name in names})
    compiled = made.compile(dialect=dialect)
    assert isinstance(compiled, sa.sql.compiler.SQLCompiler)
    assert compiled.positiontup == list(names)
    return str(compiled)


@cache
def _replacement(table: Table, dialect: str) -> sa.Insert:
    made = (postgresql if dialect == "postgresql" else sqlite).insert(table)
    key = table.primary_key.columns.keys()
    others = {name: made.excluded[name] for name in table.columns.keys() if name not in key}  # noqa: SIM118
    replacing: sa.Insert = made.on_conflict_do_update(index_elements=key, set_=others)
    return replacing


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
