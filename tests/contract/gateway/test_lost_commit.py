"""An answer to COMMIT that is lost: whether it was stored is read back, and nothing else is told."""

import asyncio
from typing import Any

import pytest

from flotilla.services.gateway.store.sql import SqlStore
from flotilla.services.gateway.store.writes import AppendEvent
from flotilla.shared.errors import Unavailable


class Lossy:
    """Loses the answers to commits of a store's engine.

    Args:
        reaches: whether the COMMIT itself still takes effect.
        absent: how often the database cannot be reached after that.
    """

    def __init__(self, store: SqlStore, *, reaches: bool, absent: int = 0) -> None:
        self._dialect: Any = store._engine.dialect
        self._commit, self._connect = self._dialect.do_commit, self._dialect.connect
        self._reaches, self.absent = reaches, absent
        self._dialect.do_commit, self._dialect.connect = self.commit, self.connect

    def commit(self, connection: Any) -> None:
        self._dialect.do_commit = self._commit
        if self._reaches:
            self._commit(connection)
        connection.driver_connection.close()  # a broken connection: its session ends, and what is open in it
        raise self._dialect.dbapi.OperationalError("server closed the connection unexpectedly")

    def connect(self, *arguments: Any, **named: Any) -> Any:
        if self.absent:
            self.absent -= 1
            raise self._dialect.dbapi.OperationalError("connection refused")
        return self._connect(*arguments, **named)


async def kinds(store: SqlStore) -> list[str]:
    return [event.type for event in await store.events("a", after=0, limit=9)]


@pytest.mark.parametrize("absent", [0, 2])
async def test_what_was_committed_is_told_as_stored(database_url: str, absent: int) -> None:
    store = await SqlStore.open(database_url)
    await store.append_event("a", "before", 0.0, {})
    lossy = Lossy(store, reaches=True, absent=absent)

    event = await store.append_event("a", "stored", 0.0, {})

    assert (event.type, lossy.absent) == ("stored", 0)
    assert await kinds(store) == ["before", "stored"]
    await store.close()


async def test_what_was_not_committed_is_told_as_not_stored(database_url: str) -> None:
    store = await SqlStore.open(database_url)
    await store.append_event("a", "before", 0.0, {})
    Lossy(store, reaches=False)
    took_effect: list[int] = []

    with pytest.raises(Unavailable):
        async with store.transaction() as change:
            change.write(AppendEvent("a", "lost", 0.0, {}))
            change.then(lambda: took_effect.append(1))

    assert (await kinds(store), took_effect) == (["before"], [])
    await store.append_event("a", "after", 0.0, {})
    assert await kinds(store) == ["before", "after"]
    await store.close()


async def test_closing_ends_the_wait_for_a_database_that_stays_away(database_url: str) -> None:
    store = await SqlStore.open(database_url)
    Lossy(store, reaches=True, absent=10**9)
    storing = asyncio.create_task(store.append_event("a", "unknown", 0.0, {}))
    await asyncio.sleep(0.05)
    assert not storing.done()

    await store.close()

    with pytest.raises(Unavailable, match="nobody knows"):
        await storing
