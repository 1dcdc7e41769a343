"""The store in SQL: SQLite in a file by default, PostgreSQL by URL. The only SQL of the service.

One thread owns the connection, so writes are in the order of the calls and the event loop never blocks.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import Connection, Engine, Table
from sqlalchemy.exc import SQLAlchemyError

from services.gateway.store import tables
from services.gateway.store.base import MetricRow
from services.gateway.store.lock import FileLock, lock_every_session
from services.gateway.store.memory import event_of
from services.gateway.store.migrate import upgrade
from services.gateway.store.records import AuditRecord, ExperimentRecord, PublicationRecord, ServiceRecord, StoredAnswer
from shared.errors import FlotillaError, Unavailable
from shared.schemas.experiment import CheckpointView, Event, ExperimentState, MetricPoint

T = TypeVar("T")
BUSY_SECONDS = 5.0
CONNECT_SECONDS = 10
ANSWER_SECONDS = 60.0
"""Longest time for a statement, what waits before it included. Far above the five seconds that SQLite may be locked."""
UPGRADE_SECONDS = 900.0
log = logging.getLogger(__name__)


def open_engine(url: str) -> Engine:
    """Make an engine for ``sqlite:///PATH`` or ``postgresql://...`` (through psycopg)."""
    if url.startswith(("postgresql://", "postgres://")):
        url = "postgresql+psycopg://" + url.split("://", 1)[1]
    if not url.startswith("sqlite"):
        # A server made under the C locale would answer in bytes.
        arguments = {"client_encoding": "utf8", "connect_timeout": CONNECT_SECONDS} if "psycopg" in url else {}
        # One connection at a time: it holds the database's lock.
        return sa.create_engine(url, pool_size=1, max_overflow=0, pool_pre_ping=True, connect_args=arguments)
    engine = sa.create_engine(url, connect_args={"timeout": BUSY_SECONDS, "check_same_thread": False})

    @sa.event.listens_for(engine, "connect")
    def prepare(connection: Any, _record: Any) -> None:
        cursor = connection.cursor()
        # NORMAL loses nothing to a killed process; a power cut may take the last transactions, in order.
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA synchronous=NORMAL")
        cursor.close()

    return engine


def _tell_of_late(doing: "asyncio.Future[Any]") -> None:
    error = None if doing.cancelled() else doing.exception()
    if error is not None:
        log.error("a late statement failed", extra={"error": repr(error)})


class SqlStore:
    """Keeps every row in a database; see ``Store``. Open it with ``SqlStore.open``."""

    def __init__(self, engine: Engine, thread: ThreadPoolExecutor) -> None:
        self._engine = engine
        self._thread = thread
        path = engine.url.database if engine.dialect.name == "sqlite" else None
        self._lock = FileLock(Path(path)) if path else None

    @classmethod
    async def open(cls, url: str) -> "SqlStore":
        """Connect, take the database's lock and bring the tables up to date.

        Raises:
            Unavailable: the database does not answer, another gateway works on it, or its migration failed.
        """
        try:
            engine = open_engine(url)
        except ModuleNotFoundError as error:
            raise Unavailable(f"this database needs {error.name}: install flotilla[postgresql]") from None
        except sa.exc.ArgumentError as error:
            raise Unavailable(f"FLOTILLA_DATABASE_URL is no database url: {error}") from None
        store = cls(engine, ThreadPoolExecutor(max_workers=1, thread_name_prefix="sql"))
        try:
            await store._in_thread(store._prepare, deadline_seconds=UPGRADE_SECONDS)
        except BaseException:
            await store.close()
            raise
        return store

    def _prepare(self) -> None:
        if self._lock is not None:
            self._lock.take()
        elif self._engine.dialect.name == "postgresql":
            lock_every_session(self._engine)
        upgrade(self._engine)

    async def _in_thread(self, work: Callable[[], T], *, deadline_seconds: float | None = None) -> T:
        """Run it after what was asked before.

        Work that is late stays in the queue and is done in its turn, so that changes are stored in their order.
        """
        limit = ANSWER_SECONDS if deadline_seconds is None else deadline_seconds
        doing = asyncio.get_running_loop().run_in_executor(self._thread, work)
        try:
            async with asyncio.timeout(limit):
                return await asyncio.shield(doing)
        except TimeoutError:
            doing.add_done_callback(_tell_of_late)
            raise Unavailable(f"the database did not answer within {limit:g} s") from None
        except asyncio.CancelledError:
            doing.add_done_callback(_tell_of_late)
            raise
        except (sa.exc.OperationalError, sa.exc.InterfaceError) as error:
            raise Unavailable(f"the database does not answer: {' '.join(str(error.orig).split())}") from error
        except SQLAlchemyError as error:
            raise FlotillaError(f"the database refused a statement: {error}") from error

    async def _write(self, work: Callable[[Connection], T]) -> T:
        def transaction() -> T:
            with self._engine.begin() as connection:
                return work(connection)

        return await self._in_thread(transaction)

    async def _rows(self, query: sa.Select[Any]) -> list[dict[str, Any]]:
        def read() -> list[dict[str, Any]]:
            with self._engine.connect() as connection:
                return [dict(row) for row in connection.execute(query).mappings()]

        return await self._in_thread(read)

    async def ping(self) -> None:
        """Prove that the database answers."""
        await self._rows(sa.select(sa.literal(1).label("one")))

    async def close(self) -> None:
        """Close the connection, release the lock, end the thread."""

        def give_up() -> None:
            self._engine.dispose()
            if self._lock is not None:
                self._lock.give_up()

        await asyncio.get_running_loop().run_in_executor(self._thread, give_up)
        self._thread.shutdown(wait=False)

    async def put_experiment(self, record: ExperimentRecord) -> None:
        """Insert or replace by id."""
        await self._write(lambda connection: _put(connection, tables.experiments, row_of(record)))

    async def experiments(self) -> list[ExperimentRecord]:
        """List all, oldest first."""
        table = tables.experiments
        rows = await self._rows(sa.select(table).order_by(table.c.created_at, table.c.id))
        return [ExperimentRecord(**{**row, "state": ExperimentState(row["state"])}) for row in rows]

    async def delete_experiment(self, experiment_id: str) -> None:
        """Delete it with all that hangs on it; the audit trail stays."""

        def delete(connection: Connection) -> None:
            for table in (tables.publications, tables.metrics, tables.events, tables.checkpoints):
                connection.execute(sa.delete(table).where(table.c.experiment_id == experiment_id))
            connection.execute(sa.delete(tables.experiments).where(tables.experiments.c.id == experiment_id))

        await self._write(delete)

    async def put_service(self, record: ServiceRecord) -> None:
        """Insert or replace by id."""
        await self._write(lambda connection: _put(connection, tables.services, row_of(record)))

    async def services(self) -> list[ServiceRecord]:
        """List all, oldest first."""
        table = tables.services
        rows = await self._rows(sa.select(table).order_by(table.c.registered_at, table.c.id))
        return [ServiceRecord(**row) for row in rows]

    async def delete_service(self, service_id: str) -> None:
        """Delete one; deleting it again does nothing."""
        table = tables.services
        await self._write(lambda connection: connection.execute(sa.delete(table).where(table.c.id == service_id)))

    async def put_publication(self, record: PublicationRecord) -> None:
        """Insert or replace by experiment and version."""
        await self._write(lambda connection: _put(connection, tables.publications, row_of(record)))

    async def publication(self, experiment_id: str, version: int) -> PublicationRecord | None:
        """Find one."""
        table = tables.publications
        query = sa.select(table).where(table.c.experiment_id == experiment_id, table.c.version == version)
        rows = await self._rows(query)
        return PublicationRecord(**rows[0]) if rows else None

    async def publications(self, experiment_id: str) -> list[PublicationRecord]:
        """List an experiment's publications by version."""
        table = tables.publications
        query = sa.select(table).where(table.c.experiment_id == experiment_id).order_by(table.c.version)
        return [PublicationRecord(**row) for row in await self._rows(query)]

    async def put_metrics(self, experiment_id: str, points: Sequence[MetricPoint]) -> None:
        """Store points; one with the same name and step replaces the earlier one and moves to the end."""
        # The last of two equal keys in one batch wins, as it would in two batches.
        newest = {(point.name, point.step): point for point in points}
        table = tables.metrics

        def put(connection: Connection) -> None:
            for name, step in newest:
                same = (table.c.experiment_id == experiment_id, table.c.name == name, table.c.step == step)
                connection.execute(sa.delete(table).where(*same))
            rows = [{"experiment_id": experiment_id, **point.model_dump()} for point in newest.values()]
            connection.execute(sa.insert(table), rows)

        if newest:
            await self._write(put)

    async def metrics(self, experiment_id: str, *, names: Sequence[str], after: int, limit: int) -> list[MetricRow]:
        """List up to ``limit`` points written after the cursor ``after``; no ``names`` means all."""
        table = tables.metrics
        query = sa.select(table).where(table.c.experiment_id == experiment_id, table.c.sequence > after)
        if names:
            query = query.where(table.c.name.in_(list(names)))
        rows = await self._rows(query.order_by(table.c.sequence).limit(limit))
        return [
            (row["sequence"], MetricPoint(**{name: row[name] for name in MetricPoint.model_fields})) for row in rows
        ]

    async def append_event(self, experiment_id: str, kind: str, at: float, data: Mapping[str, Any]) -> Event:
        """Store an event under the next id."""
        row = {"experiment_id": experiment_id, "type": kind, "at": at, "data": dict(data)}

        def insert(connection: Connection) -> int:
            key = connection.execute(sa.insert(tables.events).values(row)).inserted_primary_key
            assert key is not None
            return int(key[0])

        return event_of(await self._write(insert), kind, at, data)

    async def events(self, experiment_id: str, *, after: int, limit: int) -> list[Event]:
        """List up to ``limit`` events with an id above ``after``."""
        table = tables.events
        query = sa.select(table).where(table.c.experiment_id == experiment_id, table.c.id > after)
        rows = await self._rows(query.order_by(table.c.id).limit(limit))
        return [event_of(row["id"], row["type"], row["at"], row["data"]) for row in rows]

    async def append_audit(self, record: AuditRecord) -> None:
        """Store an audit record."""
        await self._write(lambda connection: connection.execute(sa.insert(tables.audit).values(row_of(record))))

    async def audit(self, resource: str, *, limit: int) -> list[AuditRecord]:
        """List the newest audit records of a resource, newest first."""
        table = tables.audit
        query = sa.select(table).where(table.c.resource == resource).order_by(table.c.id.desc()).limit(limit)
        return [AuditRecord(**{k: v for k, v in row.items() if k != "id"}) for row in await self._rows(query)]

    async def put_checkpoint(self, experiment_id: str, checkpoint: CheckpointView) -> None:
        """Insert or replace by experiment and step."""
        row = {"experiment_id": experiment_id, **checkpoint.model_dump()}
        await self._write(lambda connection: _put(connection, tables.checkpoints, row))

    async def checkpoints(self, experiment_id: str) -> list[CheckpointView]:
        """List by step."""
        table = tables.checkpoints
        query = sa.select(table).where(table.c.experiment_id == experiment_id).order_by(table.c.step)
        rows = await self._rows(query)
        return [CheckpointView(**{name: row[name] for name in CheckpointView.model_fields}) for row in rows]

    async def put_answer(self, answer: StoredAnswer) -> None:
        """Keep the answer to an idempotency key."""
        await self._write(lambda connection: _put(connection, tables.idempotency, row_of(answer)))

    async def answer(self, key: str) -> StoredAnswer | None:
        """Find the answer to an idempotency key."""
        rows = await self._rows(sa.select(tables.idempotency).where(tables.idempotency.c.key == key))
        return StoredAnswer(**rows[0]) if rows else None

    async def delete_answers(self, before: float) -> None:
        """Forget answers older than ``before``."""
        table = tables.idempotency
        await self._write(lambda connection: connection.execute(sa.delete(table).where(table.c.at < before)))


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


def _put(connection: Connection, table: Table, row: Mapping[str, Any]) -> None:
    key = [column == row[column.name] for column in table.primary_key]
    if connection.execute(sa.update(table).where(*key).values(dict(row))).rowcount == 0:
        connection.execute(sa.insert(table).values(dict(row)))
