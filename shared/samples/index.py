"""Finds samples among thousands of files: one small database beside them, which can be made again from them.

A file is read once, a few columns of it; afterwards a query reads the database, and of the files only those that hold
the page. Files that are new are read newest first, within the time that a query allows; the rest in later calls.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flotilla.shared.samples.folder import SAMPLES, read_columns, step_name, stored_states
from flotilla.shared.samples.query import SampleOrder, SampleQuery

log = logging.getLogger(__name__)

DATABASE = ".index.sqlite"
LAYOUT = 2
COLUMNS = ("place", "member", "kind", "step", "group_id", "row", "status", "reward")
LOCK_SECONDS = 5.0
_PLACES = 1 << 21
"""More than a file has samples."""
_TABLES = """
CREATE TABLE IF NOT EXISTS files (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, modified INTEGER NOT NULL, size INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS samples (
    id INTEGER PRIMARY KEY, place INTEGER NOT NULL, member INTEGER NOT NULL, kind TEXT NOT NULL, step INTEGER,
    group_id INTEGER NOT NULL, row INTEGER NOT NULL, status TEXT NOT NULL, reward REAL);
CREATE INDEX IF NOT EXISTS by_reward ON samples (reward);
CREATE INDEX IF NOT EXISTS by_best ON samples (-reward);
CREATE INDEX IF NOT EXISTS by_step ON samples (step);
CREATE INDEX IF NOT EXISTS by_row ON samples (row);
"""
# A file's id is the time of its last change, in milliseconds and negative: newer ones come first. A sample's id is that
# of its file, times ``_PLACES``, plus its place: ids are in the order of time, and every index ends with them.
_ORDERS = {
    SampleOrder.NEWEST: "id",
    SampleOrder.BEST: "-reward, id",
    SampleOrder.WORST: "reward, id",
}


class Found(NamedTuple):
    """Where a sample is: its file, its group's place in it, and which answer of the group it is."""

    file: str
    place: int
    member: int


class Answer(NamedTuple):
    """What a query found.

    Attributes:
        found: in the order that was asked for.
        newest: no file after this instant, in milliseconds, was examined; given back with the next page, none comes
            between two pages.
        has_more: whether more follow.
        num_files, num_unread: files there are, and those not read yet.
    """

    found: list[Found]
    newest: int
    has_more: bool
    num_files: int
    num_unread: int


class SampleIndex:
    """The index of one experiment's samples; calls block, and take turns.

    Args:
        directory: of the experiment.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / SAMPLES
        self._database: sqlite3.Connection | None = None
        self._turn = threading.Lock()

    def close(self) -> None:
        """Close the database."""
        with self._turn:
            if self._database is not None:
                self._database.close()
                self._database = None

    def refresh(self, *, seconds: float, first: Sequence[str] = ()) -> tuple[int, int]:
        """Read files that are new or changed, newest first, until the time is over.

        Args:
            seconds: that reading may take; at least one file is read.
            first: names of files that are read before others, whatever the time.

        Returns:
            How many files there are, and how many of them are not read yet.
        """
        with self._turn:
            return self._refresh(seconds, first)

    def find(
        self, query: SampleQuery, *, limit: int, offset: int = 0, newest: int | None = None, seconds: float
    ) -> Answer:
        """Find samples.

        Args:
            query: which.
            limit: most of them.
            offset: how many are passed over.
            newest: of the page before; None for the first.
            seconds: that reading new files may take.
        """
        first = [step_name(query.step)] if query.step is not None else []
        with self._turn:
            if not self.path.is_dir():
                return Answer([], 0, False, 0, 0)
            num_files, num_unread = self._refresh(seconds, first)
            if newest is None:
                newest = -int(self._open().execute("SELECT ifnull(min(id), 0) FROM files").fetchone()[0])
            where, values = _conditions(query)
            # No value is in the text: it is made of names that are written here.
            text = f"SELECT id, place, member FROM samples WHERE id >= ? {where} ORDER BY {_ORDERS[query.order]}"  # noqa: S608
            values = [-newest * _PLACES, *values, limit + 1, offset]
            rows = self._open().execute(f"{text} LIMIT ? OFFSET ?", values).fetchall()
            name = "SELECT name FROM files WHERE id = ?"
            names = {
                key: self._open().execute(name, [key]).fetchone()[0] for key in {row[0] // _PLACES for row in rows}
            }
        found = [Found(names[key // _PLACES], place, member) for key, place, member in rows[:limit]]
        return Answer(found, newest, len(rows) > limit, num_files, num_unread)

    def _open(self) -> sqlite3.Connection:
        if self._database is None:
            self._database = _connect(self.path / DATABASE)
        return self._database

    def _refresh(self, seconds: float, first: Sequence[str]) -> tuple[int, int]:
        if not self.path.is_dir():
            return 0, 0
        end = time.monotonic() + seconds
        database = self._open()
        there = stored_states(self.path)
        known = {name: (at, size) for name, at, size in database.execute("SELECT name, modified, size FROM files")}
        if there == known:
            return len(there), 0
        gone = [name for name in known if name not in there]
        new = [name for name, state in there.items() if known.get(name) != state]
        new.sort(key=lambda name: (name in first, there[name]), reverse=True)
        read = 0
        with database:
            for name in gone:
                _forget(database, name)
            for name in new:
                if read and name not in first and time.monotonic() > end:
                    break
                _forget(database, name)
                _read(database, self.path, name, *there[name])
                read += 1
        return len(there), len(new) - read


def _connect(path: Path) -> sqlite3.Connection:
    with contextlib.suppress(sqlite3.Error):
        if path.is_symlink():
            raise sqlite3.OperationalError("a link leads to the index")
        return _prepared(sqlite3.connect(path, timeout=LOCK_SECONDS, check_same_thread=False))
    # A folder that cannot be written, or a file that is no database: the index lasts as long as this process.
    log.info("the index of samples is kept in memory", extra={"path": str(path)})
    return _prepared(sqlite3.connect(":memory:", check_same_thread=False))


def _prepared(database: sqlite3.Connection) -> sqlite3.Connection:
    if database.execute("PRAGMA user_version").fetchone()[0] != LAYOUT:
        database.executescript("DROP TABLE IF EXISTS files; DROP TABLE IF EXISTS samples;")
    # It can be made again: nothing is lost that a power cut takes from it.
    database.executescript(f"PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF; PRAGMA user_version = {LAYOUT};")
    database.executescript(_TABLES)
    return database


def _forget(database: sqlite3.Connection, name: str) -> None:
    for (file,) in database.execute("DELETE FROM files WHERE name = ? RETURNING id", [name]).fetchall():
        database.execute("DELETE FROM samples WHERE id BETWEEN ? AND ?", [file * _PLACES, (file + 1) * _PLACES - 1])


def _new_id(database: sqlite3.Connection, modified_ns: int) -> int:
    found = -(modified_ns // 1_000_000)
    while database.execute("SELECT 1 FROM files WHERE id = ?", [found]).fetchone():
        found += 1
    return found


def _read(database: sqlite3.Connection, folder: Path, name: str, modified_ns: int, size_bytes: int) -> None:
    from pyarrow import ArrowException

    columns: dict[str, list[Any]] = {column: [] for column in COLUMNS}
    try:
        columns = read_columns(folder, name, COLUMNS).to_pydict()
    except FileNotFoundError:
        return
    except (OSError, ArrowException) as error:
        log.warning("a file of samples cannot be read", extra={"name_of_file": name, "error": repr(error)})
    rows = zip(*(columns[column] for column in COLUMNS), strict=True)
    identity = _new_id(database, modified_ns)
    database.executemany(
        f"INSERT INTO samples (id, {', '.join(COLUMNS)}) VALUES (?, {', '.join('?' * len(COLUMNS))})",  # noqa: S608
        ((identity * _PLACES + number, *row) for number, row in enumerate(rows)),
    )
    values = [identity, name, modified_ns, size_bytes]
    database.execute("INSERT INTO files (id, name, modified, size) VALUES (?, ?, ?, ?)", values)


def _conditions(query: SampleQuery) -> tuple[str, list[Any]]:
    """Write what a query asks as conditions, and their values."""
    found: list[tuple[str, list[Any]]] = list(_each_condition(query))
    return "".join(f" AND {text}" for text, _ in found), [value for _, values in found for value in values]


def _each_condition(query: SampleQuery) -> Iterator[tuple[str, list[Any]]]:
    for column, value in (
        ("step", query.step),
        ("row", query.row),
        ("group_id", query.group),
        ("status", query.status),
    ):
        if value is not None:
            yield f"{column} = ?", [value]
    if query.kinds:
        yield f"kind IN ({', '.join('?' * len(query.kinds))})", [kind.value for kind in query.kinds]
    if query.is_failure:
        yield "(kind = 'failed' OR status = 'error')", []
    if query.min_reward is not None:
        yield "reward >= ?", [query.min_reward]
    if query.max_reward is not None:
        yield "reward <= ?", [query.max_reward]
    if query.order is not SampleOrder.NEWEST:
        yield "reward IS NOT NULL", []
