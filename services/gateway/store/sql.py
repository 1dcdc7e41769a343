"""The store in SQL: SQLite in a file by default, PostgreSQL by URL. With ``statements`` the only SQL of the service.

One thread owns the connection, so writes are in the order of the calls and the event loop never blocks.
"""

import asyncio
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from flotilla.services.gateway.store import tables
from flotilla.services.gateway.store.base import MetricRow
from flotilla.services.gateway.store.direct import SQLITE, DirectConnection
from flotilla.services.gateway.store.locks import BEAT_SECONDS, DOUBT_SECONDS, FileLock, deposed, lock_every_session
from flotilla.services.gateway.store.memory import event_of
from flotilla.services.gateway.store.records import (
    AuditRecord,
    DeliveryRecord,
    ExperimentRecord,
    PublicationRecord,
    ServiceRecord,
    StoredAnswer,
    TokenRecord,
)
from flotilla.services.gateway.store.seen_keys import SeenKeys
from flotilla.services.gateway.store.statements import RowWriter, document, one_row, put_row
from flotilla.services.gateway.store.transaction import TransactionalStore, in_time
from flotilla.services.gateway.store.writes import PointRecord, PutRecord, Write
from flotilla.shared.errors import FlotillaError, InvalidRequest, NotLeading, Unavailable
from flotilla.shared.net.retry import Backoff
from flotilla.shared.schemas.experiment import CheckpointView, Event, ExperimentState

T = TypeVar("T")
BUSY_SECONDS = 5.0
CONNECT_SECONDS = 10
ABSENCE = {"keepalives_idle": 5, "keepalives_interval": 3, "keepalives_count": 3, "tcp_user_timeout": 15_000}
"""When a PostgreSQL server whose host has vanished is no longer waited for; the last in milliseconds."""
UPGRADE_SECONDS = 900.0
ONLY = 1
"""Key of the one row that names the last transaction."""
OURS = (
    sa.update(tables.last_transaction)
    .where(tables.last_transaction.c.number == ONLY, tables.last_transaction.c.term == sa.bindparam("our_term"))
    .values(name=sa.bindparam("new_name"))
)
"""Names a transaction, in a database that nobody else has taken over."""
# Asked for in each step, and put together once: that takes longer than the database does.
ONE_PUBLICATION, ONE_WINDOW, ONE_ANSWER = map(one_row, (tables.publications, tables.windows, tables.idempotency))
log = logging.getLogger(__name__)


MIGRATIONS = Path(__file__).parent / "migrations"


def keep_private(database: Path) -> None:
    """Make a database file readable by its owner alone: it has specs. SQLite's files beside it get the same mode."""
    descriptor = os.open(database, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)


def alembic_config() -> Config:
    """Make the settings that Alembic would read from its ini file."""
    config = Config()
    # Alembic takes a percent sign for the start of an interpolation.
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    return config


def upgrade(engine: Engine, revision: str = "head") -> None:
    """Run the migrations that the database lacks, in one transaction."""
    config = alembic_config()
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)


def open_engine(url: str) -> Engine:
    """Make an engine for ``sqlite:///PATH`` or ``postgresql://...`` (through psycopg)."""
    if url.startswith(("postgresql://", "postgres://")):
        url = "postgresql+psycopg://" + url.split("://", 1)[1]
    if not url.startswith("sqlite"):
        # A server made under the C locale would answer in bytes.
        common = {"client_encoding": "utf8", "connect_timeout": CONNECT_SECONDS} | ABSENCE
        arguments = common if "psycopg" in url else {}
        # One connection at a time: it holds the database's lock.
        return sa.create_engine(
            url, pool_size=1, max_overflow=0, pool_pre_ping=True, connect_args=arguments, json_serializer=document
        )
    arguments = {"timeout": BUSY_SECONDS, "check_same_thread": False}
    engine = sa.create_engine(url, connect_args=arguments, json_serializer=document)

    @sa.event.listens_for(engine, "connect")
    def prepare(connection: Any, _record: Any) -> None:
        cursor = connection.cursor()
        # NORMAL loses nothing to a killed process; a power cut may take the last transactions, in order.
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA synchronous=NORMAL")
        cursor.close()

    return engine


class SqlStore(TransactionalStore):
    """Keeps every row in a database; see ``Store``. Open it with ``SqlStore.open``.

    Each opening has a greater *term* than those before, and writes only while it is the last: whoever was stopped while
    another took over stores nothing of what it knew.

    Attributes:
        has_standbys: whether another process may take the database over while this one runs.
    """

    def __init__(self, engine: Engine, thread: ThreadPoolExecutor, leader: str, on_deposed: Callable[[], None]) -> None:
        super().__init__()
        self.has_standbys = engine.dialect.name == "postgresql"
        self._leader, self._on_deposed = leader, on_deposed
        self._term: int | None = None
        self._writer = RowWriter()
        self._seen = SeenKeys()
        self._confirmed_at = time.monotonic()
        self._engine = engine
        self._thread = thread
        self._is_closing = threading.Event()
        path = engine.url.database if engine.dialect.name == SQLITE else None
        self._lock = FileLock(Path(path)) if path else None

    @classmethod
    async def open(cls, url: str, leader: str = "", on_deposed: Callable[[], None] = lambda: None) -> "SqlStore":
        """Connect, take the database's lock, bring the tables up to date and begin a term.

        Args:
            url: of the database.
            leader: address of this gateway, for those who wait.
            on_deposed: called once another has taken its place.

        Raises:
            NotLeading: another gateway works on it.
            Unavailable: the database does not answer, or its migration failed.
        """
        try:
            engine = open_engine(url)
        except ModuleNotFoundError as error:
            raise Unavailable(f"this database needs {error.name}: install flotilla[postgresql]") from None
        except sa.exc.ArgumentError as error:
            raise Unavailable(f"FLOTILLA_DATABASE_URL is no database url: {error}") from None
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sql")
        store = cls(engine, thread, leader, on_deposed)
        try:
            async with asyncio.timeout(UPGRADE_SECONDS):
                await store._in_thread(store._prepare)
        except TimeoutError:
            await store.close()
            raise Unavailable(f"the database did not answer within {UPGRADE_SECONDS:g} s") from None
        except BaseException:
            await store.close()
            raise
        return store

    def _prepare(self) -> None:
        if self._lock is not None:
            self._lock.take()
            keep_private(self._lock.database)
        elif self._engine.dialect.name == "postgresql":
            lock_every_session(self._engine)
        upgrade(self._engine)
        row = tables.last_transaction
        with self._engine.begin() as connection:
            before = connection.scalar(sa.select(row.c.term).with_for_update()) or 0
            put_row(connection, row, {"number": ONLY, "name": "", "term": before + 1, "leader": self._leader})
        self._term, self._confirmed_at = before + 1, time.monotonic()
        with self._engine.connect() as connection:
            # From here on nobody else adds any.
            for key in connection.scalars(sa.select(tables.idempotency.c.key)):
                self._seen.add(key)

    @property
    def is_in_doubt(self) -> bool:
        """Whether another may have taken the database over: it has not answered ``confirm`` for too long."""
        return self.has_standbys and time.monotonic() > self._confirmed_at + DOUBT_SECONDS

    async def confirm(self) -> None:
        """Prove that nobody has taken the database over; what is not asked for some seconds is taken for dead.

        Raises:
            NotLeading: another gateway has taken it over.
            Unavailable: the database does not answer.
        """
        began = time.monotonic()

        def ask() -> None:
            with self._engine.connect() as connection:
                if connection.scalar(sa.select(tables.last_transaction.c.term)) != self._term:
                    raise deposed()

        await in_time(asyncio.ensure_future(self._in_thread(ask)))
        self._confirmed_at = began

    async def beat(self) -> None:
        """Confirm again and again until cancelled, which shows those who wait that this process lives."""
        while True:
            try:
                await self.confirm()
            except FlotillaError as error:
                log.warning("the database does not confirm that this gateway leads", extra={"error": error.detail})
            await asyncio.sleep(BEAT_SECONDS)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run it after what was asked before; what is cancelled is done in its turn all the same."""
        try:
            return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, work))
        except NotLeading:
            if self._term is not None:
                self._on_deposed()
            raise
        except (sa.exc.OperationalError, sa.exc.InterfaceError) as error:
            raise Unavailable(f"the database does not answer: {' '.join(str(error.orig).split())}") from error
        except (OverflowError, UnicodeEncodeError, sa.exc.DataError) as error:
            cause = error.orig if isinstance(error, sa.exc.DataError) else error
            raise InvalidRequest(f"a value cannot be stored: {' '.join(str(cause).split())[:200]}") from error
        except SQLAlchemyError as error:
            raise FlotillaError(f"the database refused a statement: {error}") from error

    async def apply(self, writes: Sequence[Write]) -> list[Event]:
        """Store all of them or none; return the events among them."""
        for write in writes:
            if isinstance(write, PutRecord) and isinstance(write.record, StoredAnswer):
                # Before it is stored: it may be asked for before that is known.
                self._seen.add(write.record.key)
        return await self._in_thread(lambda: self._apply(writes))

    def _apply(self, writes: Sequence[Write]) -> list[Event]:
        with self._engine.connect() as connection:
            transaction = connection.begin()
            name = secrets.token_hex(8)
            # First, so that whoever takes over waits for this transaction, or this one for them.
            writing = DirectConnection(connection) if connection.dialect.name == SQLITE else connection
            if not writing.execute(OURS, {"new_name": name, "our_term": self._term}).rowcount:
                raise deposed()
            events = self._writer.write(writing, writes)
            try:
                transaction.commit()
                self._writer.are_stored()
                return events
            except SQLAlchemyError as error:
                connection.invalidate(error)
                lost = error
        if self._is_stored(name):
            log.warning("the answer to a commit was lost, it is stored", extra={"error": repr(lost)})
            self._writer.are_stored()
            return events
        raise lost

    def _is_stored(self, name: str) -> bool:
        """Ask whether the last transaction was stored, until the database answers.

        A commit that is still under way has ended before: on PostgreSQL its session holds the database's lock.

        Raises:
            Unavailable: the store is closed before it is known.
        """
        pauses = Backoff()
        while True:
            try:
                with self._engine.connect() as connection:
                    row = tables.last_transaction.c
                    found = connection.execute(sa.select(row.name, row.term).with_for_update()).one()
                    if found.term != self._term:
                        raise deposed()
                    return bool(found.name == name)
            except NotLeading:
                raise
            except (SQLAlchemyError, Unavailable) as error:
                log.warning("nobody knows yet whether a change is stored", extra={"error": repr(error)})
                if self._is_closing.wait(pauses.after(error)):
                    raise Unavailable(f"nobody knows whether a change is stored: {error}") from error

    async def _rows(self, query: sa.Select[Any], **values: object) -> list[dict[str, Any]]:
        def read() -> list[dict[str, Any]]:
            with self._engine.connect() as connection:
                return [dict(row) for row in connection.execute(query, values).mappings()]

        return await in_time(asyncio.ensure_future(self._in_thread(read)))

    async def ping(self) -> None:
        """Prove that the database answers."""
        await self._rows(sa.select(sa.literal(1).label("one")))

    async def close(self) -> None:
        """Close the connection, release the lock, end the thread."""
        await self._end_waiting()
        self._is_closing.set()

        def give_up() -> None:
            self._engine.dispose()
            if self._lock is not None:
                self._lock.give_up()

        await asyncio.get_running_loop().run_in_executor(self._thread, give_up)
        self._thread.shutdown(wait=False)

    async def experiments(self) -> list[ExperimentRecord]:
        """List all, oldest first."""
        table = tables.experiments
        rows = await self._rows(sa.select(table).order_by(table.c.number, table.c.created_at, table.c.id))
        return [ExperimentRecord(**{**row, "state": ExperimentState(row["state"])}) for row in rows]

    async def services(self) -> list[ServiceRecord]:
        """List all, oldest first."""
        table = tables.services
        rows = await self._rows(sa.select(table).order_by(table.c.number, table.c.registered_at, table.c.id))
        return [ServiceRecord(**row) for row in rows]

    async def publication(self, experiment_id: str, version: int) -> PublicationRecord | None:
        """Find one."""
        rows = await self._rows(ONE_PUBLICATION, experiment_id=experiment_id, version=version)
        return PublicationRecord(**rows[0]) if rows else None

    async def publications(self, experiment_id: str, *, live_at: int | None = None) -> list[PublicationRecord]:
        """List an experiment's publications by version."""
        table, columns = tables.publications, tables.publications.c
        query = sa.select(table).where(columns.experiment_id == experiment_id)
        if live_at is not None:
            last = (
                query.with_only_columns(columns.version).order_by(columns.epoch.desc(), columns.version.desc()).limit(1)
            )
            one_of = [live_at, last.scalar_subquery()]
            query = query.where(sa.or_(columns.ended_at.is_(None), *(columns.version == each for each in one_of)))
        return [PublicationRecord(**row) for row in await self._rows(query.order_by(columns.version))]

    async def metrics(self, experiment_id: str, *, names: Sequence[str], after: int, limit: int) -> list[MetricRow]:
        """List up to ``limit`` points written after the cursor ``after``; no ``names`` means all."""
        await self.store_waiting()
        columns = tables.metrics.c
        query = sa.select(columns.sequence, *(columns[field] for field in PointRecord._fields)).where(
            columns.experiment_id == experiment_id, columns.sequence > after
        )
        if names:
            begins = [columns.name.startswith(name[:-1], autoescape=True) for name in names if name.endswith("*")]
            query = query.where(sa.or_(columns.name.in_(list(names)), *begins))
        query = query.order_by(columns.sequence).limit(limit)

        def read() -> list[MetricRow]:
            with self._engine.connect() as connection:
                return [(row[0], PointRecord._make(row[1:])) for row in connection.execute(query)]

        return await in_time(asyncio.ensure_future(self._in_thread(read)))

    async def metric_names(self, experiment_id: str) -> set[str]:
        """List the names that an experiment has points of."""
        await self.store_waiting()
        table = tables.metrics
        query = sa.select(table.c.name).where(table.c.experiment_id == experiment_id).distinct()
        return {row["name"] for row in await self._rows(query)}

    async def events(self, experiment_id: str, *, after: int, limit: int, types: Collection[str] = ()) -> list[Event]:
        """List up to ``limit`` events with an id above ``after``, of some types or of all."""
        await self.store_waiting()
        table = tables.events
        query = sa.select(table).where(table.c.experiment_id == experiment_id, table.c.id > after)
        if types:
            query = query.where(table.c.type.in_(sorted(types)))
        rows = await self._rows(query.order_by(table.c.id).limit(limit))
        return [event_of(row["id"], row["type"], row["at"], row["data"]) for row in rows]

    async def audit(self, resource: str, *, limit: int) -> list[AuditRecord]:
        """List the newest audit records of a resource, newest first."""
        table = tables.audit
        query = sa.select(table).where(table.c.resource == resource).order_by(table.c.id.desc()).limit(limit)
        return [AuditRecord(**{k: v for k, v in row.items() if k != "id"}) for row in await self._rows(query)]

    async def checkpoints(self, experiment_id: str) -> list[CheckpointView]:
        """List by step."""
        table = tables.checkpoints
        query = sa.select(table).where(table.c.experiment_id == experiment_id).order_by(table.c.step)
        rows = await self._rows(query)
        return [CheckpointView(**{name: row[name] for name in CheckpointView.model_fields}) for row in rows]

    async def window(self, experiment_id: str, name: str) -> Mapping[str, Any]:
        """Find a measurement that had not ended; empty if there is none."""
        await self.store_waiting()
        rows = await self._rows(ONE_WINDOW, experiment_id=experiment_id, name=name)
        return dict(rows[0]["data"]) if rows else {}

    async def tokens(self) -> list[TokenRecord]:
        """List all, oldest first."""
        table = tables.tokens
        rows = await self._rows(sa.select(table).order_by(table.c.created_at, table.c.id))
        return [TokenRecord(**row) for row in rows]

    async def answer(self, key: str) -> StoredAnswer | None:
        """Find the answer to an idempotency key."""
        rows = await self._rows(ONE_ANSWER, key=key) if key in self._seen else []
        return StoredAnswer(**rows[0]) if rows else None

    async def deliveries(self) -> list[DeliveryRecord]:
        """List what waits to be sent to web hooks, in the order of the events."""
        table = tables.webhook_deliveries
        rows = await self._rows(sa.select(table).order_by(table.c.id))
        return [DeliveryRecord(**{k: v for k, v in row.items() if k != "id"}) for row in rows]
