"""The rows of a gateway's database, as lines of JSON: of one moment, and for a database of either kind."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, TypeVar

import sqlalchemy as sa
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from pydantic import BaseModel, JsonValue, StringConstraints, ValidationError

from flotilla.services.gateway.store import tables
from flotilla.services.gateway.store.locks import FileLock, lock_every_session
from flotilla.services.gateway.store.sql import alembic_config, keep_private, open_engine, upgrade
from flotilla.shared.checkpoints.folders import CHECKPOINTS
from flotilla.shared.errors import Conflict, InvalidRequest, Unavailable
from flotilla.shared.files.beneath import read_beneath

BATCH_ROWS: Final = 1000
CHECKPOINT_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
Known = TypeVar("Known", bound=BaseModel)
Row = dict[str, JsonValue]
"""Of any table: its columns by name."""
OWN: Final = frozenset({tables.last_transaction.name, tables.services.name, tables.webhook_deliveries.name})
"""What belongs to one fleet and is not taken to another: its services register with the gateway that they have, and
it sends itself what waits for its web hooks."""
RIGHTS: Final = frozenset({tables.tokens.name, tables.idempotency.name})
"""Rows that grant access, or are answered in the gateway's name: those of a foreign backup would be trusted."""
ExperimentId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}$")]
"""As the gateway makes them; names of folders and of keys are made of it."""


def dump_rows(url: str, folder: Path) -> str:
    """Write each table to ``TABLE.jsonl``, all as of one moment, while a gateway works on them; blocks.

    Returns:
        The revision of the schema.

    Raises:
        Conflict: a gateway of another release made the database.
        Unavailable: it does not answer.
    """
    engine = open_engine(url)
    try:
        with engine.connect().execution_options(**_snapshot(engine)) as connection:
            if engine.dialect.name == "sqlite":
                connection.exec_driver_sql("BEGIN")  # else each statement would see a moment of its own
            revision = MigrationContext.configure(connection).get_current_revision()
            newest = ScriptDirectory.from_config(alembic_config()).get_current_head()
            if revision is None or revision != newest:
                raise Conflict(f"the database has schema {revision}, this release {newest}: back up with the gateway's")
            for table in tables.metadata.sorted_tables:
                if table.name not in OWN:
                    _dump(connection, table, folder / f"{table.name}.jsonl")
            return revision
    except sa.exc.SQLAlchemyError as error:
        raise Unavailable(f"the database cannot be read: {' '.join(str(error).split())[:300]}") from error
    finally:
        engine.dispose()


def _snapshot(engine: sa.Engine) -> dict[str, str]:
    return {} if engine.dialect.name == "sqlite" else {"isolation_level": "REPEATABLE READ"}


def _dump(connection: sa.Connection, table: sa.Table, path: Path) -> None:
    found = connection.execution_options(stream_results=True, yield_per=BATCH_ROWS).execute(sa.select(table))
    with path.open("w", encoding="utf-8") as file:
        for row in found.mappings():
            file.write(json.dumps(dict(row)) + "\n")


class ExperimentRow(BaseModel, frozen=True):
    """What a restore has to know of an experiment; see the table's columns."""

    id: ExperimentId
    state: str
    step: int
    policy_version: int
    directory: str
    started_at: float | None


class TokenRow(BaseModel, frozen=True):
    """What to show of a token before a restore; see the table's columns."""

    name: str
    scope: str
    experiment_id: str | None


def experiments_of(folder: Path) -> list[ExperimentRow]:
    """Read the experiments of a dumped database.

    Raises:
        InvalidRequest: they are not there, or damaged.
    """
    return _rows_of(folder, tables.experiments, ExperimentRow)


def tokens_of(folder: Path) -> list[TokenRow]:
    """Read the tokens of a dumped database; raises as ``experiments_of``."""
    return _rows_of(folder, tables.tokens, TokenRow)


def _rows_of(folder: Path, table: sa.Table, model: type[Known]) -> list[Known]:
    name = f"{table.name}.jsonl"
    try:
        with read_beneath(folder, name) as file:
            return [model.model_validate_json(line) for line in file]
    except ValidationError as error:
        what = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:3])
        raise InvalidRequest(f"this backup is damaged: {name} cannot be read: {what}") from None
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"this backup is damaged: {name} cannot be read: {error}") from None


def restore_rows(
    url: str,
    folder: Path,
    revision: str,
    directories: Mapping[str, tuple[str, str]],
    *,
    with_rights: bool = False,
) -> None:
    """Write the rows into a database that has none, under its lock; all or none; blocks.

    Args:
        url: of the database.
        folder: with the tables.
        revision: of their schema.
        directories: of each experiment, as recorded and as it will be.
        with_rights: also the tokens that were made by the fleet's operators, which let their holders in, and the
            answers that repeated requests get.

    Raises:
        Conflict: the database has experiments.
        NotLeading: a gateway works on it.
        InvalidRequest: a table is missing, they are of a later release, or name files of others.
        Unavailable: it does not answer.
    """
    engine = open_engine(url)
    path = engine.url.database if engine.dialect.name == "sqlite" else None
    lock = FileLock(Path(path)) if path else None
    left_out = OWN if with_rights else OWN | RIGHTS
    try:
        if lock is not None:
            lock.take()
            keep_private(lock.database)
        else:
            lock_every_session(engine)
        upgrade(engine, revision)
        with engine.begin() as connection:
            if connection.scalar(sa.select(sa.func.count()).select_from(tables.experiments)):
                raise Conflict("the database has experiments already: restore into an empty one")
            there = frozenset(sa.inspect(connection).get_table_names())  # a backup of an earlier release has fewer
            for table in tables.metadata.sorted_tables:
                if table.name in there - left_out:
                    _restore(connection, table, folder / f"{table.name}.jsonl", directories)
    except CommandError as error:
        raise InvalidRequest(f"this backup is of a later release: its schema is {revision}: {error}") from None
    except OSError as error:
        raise InvalidRequest(f"this backup is damaged: {error.filename} cannot be read: {error.strerror}") from None
    except sa.exc.SQLAlchemyError as error:
        raise Unavailable(f"the database cannot be restored: {' '.join(str(error).split())[:300]}") from error
    finally:
        engine.dispose()
        if lock is not None:
            lock.give_up()


def _restore(
    connection: sa.Connection, table: sa.Table, path: Path, directories: Mapping[str, tuple[str, str]]
) -> None:
    batch: list[Row] = []
    with read_beneath(path.parent, path.name) as file:
        for line in file:
            row = _moved(table, json.loads(line), directories)
            if row is None:
                continue
            batch.append(row)
            if len(batch) == BATCH_ROWS:
                connection.execute(sa.insert(table), batch)
                batch = []
    if batch:
        connection.execute(sa.insert(table), batch)
    number = next((each for each in table.primary_key if each.autoincrement is True), None)
    if number is not None and connection.dialect.name == "postgresql":
        # Rows that bring their number with them do not move the sequence.
        sequence = sa.func.pg_get_serial_sequence(table.name, number.name)
        last = sa.select(sa.func.coalesce(sa.func.max(number), 0) + 1).scalar_subquery()
        connection.execute(sa.select(sa.func.setval(sequence, last, False)))


def _moved(table: sa.Table, row: Row, directories: Mapping[str, tuple[str, str]]) -> Row | None:
    """Put an experiment's files where they are now; None for rows of an experiment that is not in the backup.

    Raises:
        InvalidRequest: a checkpoint is not in its experiment's directory.
    """
    key = "id" if table is tables.experiments else "experiment_id"
    if key not in table.columns or table is tables.tokens:
        return row
    found = directories.get(str(row[key]))
    if found is None:
        return None
    if table is tables.experiments:
        return row | {"directory": found[1]}
    return row if table is not tables.checkpoints else row | {"path": _checkpoint(str(row["path"]), *found)}


def _checkpoint(path: str, before: str, now: str) -> str:
    """Move a checkpoint's path with its experiment."""
    name = path.removeprefix(f"{before}/{CHECKPOINTS}/")
    # A name alone, as the gateway lets trainers record it: no `..`, and nothing that is not beneath.
    if path == name or not CHECKPOINT_NAME.fullmatch(name):
        raise InvalidRequest(f"this backup is damaged: {path[:200]!r} is no checkpoint of an experiment at {before}")
    return f"{now}/{CHECKPOINTS}/{name}"
