"""Run folders that are only looked at: their databases stay as they are, and are not believed."""

import shutil
import sqlite3
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest

from flotilla.services.gateway.recorded import recorded_state
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.services.gateway.store.left_behind import DATABASE
from flotilla.services.gateway.store.sql import SqlStore
from flotilla.services.gateway.store.writes import PointRecord, PutMetrics, PutRecord
from flotilla.shared.errors import Conflict, Unavailable
from tests.unit.gateway.builders import a_record

AT = "2026-01-02T03:04:05.000Z"


def a_point(step: int) -> PointRecord:
    return PointRecord(name="reward/mean", step=step, version=step, value=0.5, at=AT)


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    """A data directory with one experiment, whose gateway has ended."""
    made = tmp_path / "run"
    made.mkdir()
    store = await SqlStore.open(f"sqlite:///{made / DATABASE}")
    await store.apply([PutRecord(a_record("tiny-1")), PutMetrics("tiny-1", [a_point(1)])])
    await store.close()
    return made


async def steps_of(folder: Path) -> list[int]:
    async with AsyncExitStack() as stack:
        state = await stack.enter_async_context(recorded_state(settings_of(folder), [folder]))
        return [point.step for _, point in await state.store.metrics("tiny-1", names=(), after=0, limit=9)]


async def directory_of(folder: Path) -> Path:
    async with recorded_state(settings_of(folder), [folder]) as state:
        return Path(state.repository.get("tiny-1").record.directory)


def settings_of(folder: Path) -> GatewaySettings:
    return GatewaySettings(token="x" * 32, redis_url="", data=folder)


def contents_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def test_a_log_of_writes_that_a_killed_gateway_left_is_read_and_left(folder: Path, tmp_path: Path) -> None:
    store = await SqlStore.open(f"sqlite:///{folder / DATABASE}")
    await store.apply([PutMetrics("tiny-1", [a_point(2)])])
    killed = tmp_path / "killed"
    shutil.copytree(folder, killed)
    await store.close()
    assert (killed / f"{DATABASE}-wal").stat().st_size > 0
    before = contents_of(killed)

    assert await steps_of(killed) == [1, 2]

    assert contents_of(killed) == before


async def test_a_journal_that_a_killed_writer_left_is_rolled_back_in_the_copy_alone(
    folder: Path, tmp_path: Path
) -> None:
    killed = tmp_path / "killed"
    with closing(sqlite3.connect(folder / DATABASE, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
        # So small that the change is in the database before it is committed.
        connection.execute("PRAGMA cache_size=1")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("DELETE FROM metrics")
        connection.executemany(
            "INSERT INTO audit (at, action, resource, detail, actor) VALUES (1, ?, 'r', '{}', 'a')",
            [("x" * 900,)] * 200,
        )
        shutil.copytree(folder, killed)
        connection.execute("ROLLBACK")
    assert (killed / f"{DATABASE}-journal").stat().st_size > 0
    before = contents_of(killed)

    assert await steps_of(killed) == [1]

    assert contents_of(killed) == before


async def test_a_fleet_at_work_is_read_as_of_its_last_commit(folder: Path) -> None:
    store = await SqlStore.open(f"sqlite:///{folder / DATABASE}")
    try:
        await store.apply([PutMetrics("tiny-1", [a_point(2)])])

        assert await steps_of(folder) == [1, 2]
    finally:
        await store.close()


async def test_a_file_that_is_no_database_is_refused_by_name(folder: Path) -> None:
    (folder / DATABASE).write_bytes(b"no database " * 1000)

    with pytest.raises(Unavailable, match=rf"{DATABASE} cannot be read: .*not a database"):
        await steps_of(folder)


async def test_a_database_of_a_later_release_is_refused_by_name(folder: Path) -> None:
    with closing(sqlite3.connect(folder / DATABASE)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")

    with pytest.raises(Unavailable, match=rf"{DATABASE} cannot be read: .*9999"):
        await steps_of(folder)


async def test_a_damaged_row_is_refused_by_the_name_of_its_file(folder: Path) -> None:
    with closing(sqlite3.connect(folder / DATABASE)) as connection, connection:
        connection.execute("UPDATE experiments SET state = 'floating'")

    with pytest.raises(Unavailable, match=rf"{DATABASE} cannot be read: .*floating"):
        await steps_of(folder)


async def test_files_outside_of_the_folder_are_not_shown_whatever_its_database_says(
    folder: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    await rename(folder, str(elsewhere))

    assert await directory_of(folder) == folder / "experiments" / "tiny-1"

    (folder / "experiments").mkdir()
    (folder / "experiments" / "tiny-1").symlink_to(elsewhere)
    with pytest.raises(Conflict, match="leads out of"):
        await directory_of(folder)


@pytest.mark.parametrize("place", ["experiments/tiny-1", "kept/by/hand"])
async def test_files_below_the_folder_are_found(folder: Path, place: str) -> None:
    (folder / place).mkdir(parents=True)
    await rename(folder, str(folder / place))

    assert await directory_of(folder) == folder / place


async def rename(folder: Path, directory: str) -> None:
    store = await SqlStore.open(f"sqlite:///{folder / DATABASE}")
    await store.apply([PutRecord(replace(a_record("tiny-1"), directory=directory))])
    await store.close()
