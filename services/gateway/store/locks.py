"""The lock of a database: the gateway that holds it leads, others are refused, or wait and look who leads.

A process that is stopped, or a host that vanished, keeps its session, and with it the lock. Who leads asks the database
something every ``BEAT_SECONDS``; a session that has waited for its client for ``SILENT_SECONDS``, by the server's own
clock, has lost it: whoever waits ends that session, and the lock with it.
"""

import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import sqlalchemy as sa
from sqlalchemy import Connection, Engine

from flotilla.services.gateway.store import tables
from flotilla.shared.errors import NotLeading, Unavailable

TAKE_OVER_SECONDS = 3.0
"""How long a server may take to notice that the session before has ended: its process may have been killed just now."""
RETRY_SECONDS = 0.1
BEAT_SECONDS: Final = 2.0
SILENT_SECONDS: Final = 8.0
DOUBT_SECONDS: Final = 6.0
"""Without an answer to its beats for so long, a gateway with standbys does not know whether it leads."""
ADVISORY_KEY: Final = 0x464C4F54494C4C41
"""``FLOTILLA`` in ASCII. Advisory locks are the database's own."""
_HOLDER: Final = sa.text(
    "SELECT a.pid, COALESCE(a.state <> 'active' OR a.wait_event = 'ClientWrite', false) AS waits, "
    "COALESCE(EXTRACT(EPOCH FROM clock_timestamp() - a.state_change), 0) AS seconds "
    "FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid "
    "WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 "
    "AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
    "AND l.classid::bigint = :high AND l.objid::bigint = :low"
)


def refused(by: str = "") -> NotLeading:
    """Make the error of a database that another gateway works on."""
    return NotLeading(f"another gateway works on this database{by}: stop it first, or give this one data of its own")


def deposed() -> NotLeading:
    """Make the error of a gateway whose place another has taken."""
    return NotLeading("another gateway works on this database, and has taken this one's place")


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


@dataclass(frozen=True, slots=True)
class Sighting:
    """What a standby sees of a database.

    Attributes:
        is_free: nobody holds its lock.
        leader: address of the gateway that led last; None: not known.
    """

    is_free: bool
    leader: str | None


def look(engine: Engine) -> Sighting:
    """See who holds a PostgreSQL database's lock; end the session of a holder that is silent. Blocks."""
    with engine.connect() as connection:
        held = connection.execute(_HOLDER, {"high": ADVISORY_KEY >> 32, "low": ADVISORY_KEY & 0xFFFFFFFF}).one_or_none()
        if held is not None and held.waits and held.seconds > SILENT_SECONDS:
            connection.execute(sa.text("SELECT pg_terminate_backend(:pid)"), {"pid": held.pid})
        return Sighting(held is None, _leader_of(connection))


def _leader_of(connection: Connection) -> str | None:
    try:
        return connection.scalar(sa.select(tables.last_transaction.c.leader))
    except sa.exc.ProgrammingError:
        return None  # a database that no gateway of this release has opened yet
