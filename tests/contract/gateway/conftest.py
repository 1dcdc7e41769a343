"""Every twin of the store: memory, SQLite in a file, PostgreSQL where its binaries are found."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from flotilla.services.gateway.store.base import Store
from flotilla.services.gateway.store.memory import MemoryStore
from flotilla.services.gateway.store.sql import SqlStore
from tests.postgres import new_database
from tests.postgres import postgres_url as postgres_url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind in turn."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'gateway.sqlite'}"
    return new_database(request.getfixturevalue("postgres_url"))


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    """Each twin in turn, empty."""
    if request.param == "memory":
        yield MemoryStore()
        return
    is_file = request.param == "sqlite"
    file_url = f"sqlite:///{tmp_path / 'gateway.sqlite'}"
    opened = await SqlStore.open(file_url if is_file else new_database(request.getfixturevalue("postgres_url")))
    try:
        yield opened
    finally:
        await opened.close()
