"""One gateway per database: whoever opens it holds its lock, and the lock ends with the process that holds it.

SQLite        a file beside the database, locked with ``flock``: the kernel gives it up when the process ends
PostgreSQL    an advisory lock of the session, taken by every connection before it is used. The store has one connection
              at a time, so nothing is ever written by a gateway that does not hold the lock; when its session breaks
              and another gateway has come in between, its next connection is refused.
"""

import fcntl
import os
import time
from pathlib import Path
from typing import IO, Any

import sqlalchemy as sa
from sqlalchemy import Engine

from flotilla.shared.errors import Unavailable

TAKE_OVER_SECONDS = 3.0
"""How long a server may take to notice that the session before has ended: its process may have been killed just now."""
RETRY_SECONDS = 0.1
ADVISORY_KEY = 0x464C4F54494C4C41
"""``FLOTILLA`` in ASCII. Advisory locks are the database's own."""


def refused(by: str = "") -> Unavailable:
    """Make the error of a database that another gateway works on."""
    return Unavailable(f"another gateway works on this database{by}: stop it first, or give this one data of its own")


def keep_private(database: Path) -> None:
    """Make a database file readable by its owner alone: it has specs. SQLite's files beside it get the same mode."""
    descriptor = os.open(database, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)


class FileLock:
    """The lock of a database in a file.

    Args:
        database: the database; the lock is ``DATABASE.lock`` beside it.
    """

    def __init__(self, database: Path) -> None:
        self.database = database
        self._path = database.with_name(f"{database.name}.lock")
        self._file: IO[str] | None = None

    def take(self) -> None:
        """Take the lock.

        Raises:
            Unavailable: another process holds it, or the folder cannot be written.
        """
        try:
            file = self._path.open("a+")
        except OSError as error:
            raise Unavailable(f"the database does not answer: {self._path}: {error.strerror or error}") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            pid = file.read().strip()
            file.close()
            raise refused(f" (process {pid})" if pid else "") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        self._file = file

    def give_up(self) -> None:
        """Release the lock. The file stays: who deleted it could delete one that another has just locked."""
        if self._file is not None:
            self._file.close()
            self._file = None


def lock_every_session(engine: Engine) -> None:
    """Let each new connection of a PostgreSQL engine take the database's lock before it is used."""

    @sa.event.listens_for(engine, "connect")
    def take(connection: Any, _record: Any) -> None:
        end = time.monotonic() + TAKE_OVER_SECONDS
        with connection.cursor() as cursor:
            while True:
                cursor.execute("SELECT pg_try_advisory_lock(%s)", (ADVISORY_KEY,))
                is_ours = cursor.fetchone()[0]
                connection.commit()
                if is_ours:
                    return
                if time.monotonic() >= end:
                    break
                time.sleep(RETRY_SECONDS)
        connection.close()
        raise refused()
