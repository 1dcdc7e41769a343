"""Statements on SQLite, compiled once and run by the driver's own cursor within a transaction of SQLAlchemy.

A step of training writes some twenty statements. For each of them SQLAlchemy does several times the work that SQLite
does: it looks the compiled statement up, makes a context and a result, and asks who listens.
"""

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy import Connection, Dialect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql.compiler import SQLCompiler

SQLITE: Final = "sqlite"
Statement = sa.Insert | sa.Update | sa.Delete


class Done(NamedTuple):
    """What a statement did, by the names that SQLAlchemy's results have; the key is that of an insertion."""

    rowcount: int
    inserted_primary_key: tuple[int]


class DirectConnection:
    """Stands in for a connection to SQLite where rows are written, within a transaction that it has begun."""

    def __init__(self, connection: Connection) -> None:
        self.dialect: Final = connection.dialect
        self._connection = connection
        self._cursor: Any = connection.connection.cursor()

    def execute(self, statement: Statement, row: Mapping[str, Any] | None = None) -> Done:
        """Run a statement whose values are those of ``row``; one without a row holds its own, and is not kept.

        Raises:
            DBAPIError: as SQLAlchemy's connection.
        """
        if row is None:
            return Done(self._connection.execute(statement).rowcount, (0,))
        text, places = compiled(statement, tuple(row), self.dialect)
        values = [place.prepared(row) for place in places]
        with _Named(text, values):
            self._cursor.execute(text, values)
        return Done(self._cursor.rowcount, (self._cursor.lastrowid,))

    def exec_driver_sql(self, text: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """Run a statement once for each row.

        Raises:
            DBAPIError: as SQLAlchemy's connection.
        """
        with _Named(text, rows):
            self._cursor.executemany(text, rows)


class Place(NamedTuple):
    """A place for a value in a statement's text.

    Attributes:
        constant: the value where no row has one of this name.
        prepare: makes what the driver takes; None where it takes the value as it is.
    """

    name: str
    constant: Any
    prepare: Callable[[Any], Any] | None

    def prepared(self, row: Mapping[str, Any]) -> Any:
        """Return a row's value as the driver takes it."""
        value = row.get(self.name, self.constant)
        return value if self.prepare is None else self.prepare(value)


class _Named:
    """Raises the driver's errors as SQLAlchemy's."""

    def __init__(self, text: str, values: Sequence[Any]) -> None:
        self._text, self._values = text, values

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, sqlite3.Error):
            raise DBAPIError.instance(self._text, self._values, error, sqlite3.Error) from error


@lru_cache(maxsize=256)
def compiled(statement: Statement, names: tuple[str, ...], dialect: Dialect) -> tuple[str, list[Place]]:
    """Compile a statement for rows that have these values; return its text and the places in it, in order."""
    made = statement.compile(dialect=dialect, column_keys=list(names))
    assert isinstance(made, SQLCompiler)
    assert made.positiontup is not None
    places = []
    for name in made.positiontup:
        bound = made.binds[name]
        prepare = bound.type.dialect_impl(dialect).bind_processor(dialect)
        places.append(Place(name, bound.value, prepare))
    return str(made), places
