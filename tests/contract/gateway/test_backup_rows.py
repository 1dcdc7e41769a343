"""Rows of a database come back in a database of either kind, under another directory, and numbers go on."""

from dataclasses import replace
from pathlib import Path

import pytest

from flotilla.backup.rows import dump_rows, restore_rows
from flotilla.services.gateway.store.records import AuditRecord
from flotilla.services.gateway.store.sql import SqlStore
from flotilla.services.gateway.store.writes import AppendAudit, AppendEvent, PutCheckpoint, PutRecord
from flotilla.shared.errors import Conflict, InvalidRequest
from flotilla.shared.schemas.experiment import CheckpointView
from tests.contract.gateway.test_store import SERVICE
from tests.unit.gateway.builders import a_record


async def test_rows_are_restored_into_a_database_of_either_kind(database_url: str, tmp_path: Path) -> None:
    source = f"sqlite:///{tmp_path / 'source.sqlite'}"
    store = await SqlStore.open(source)
    record = a_record("a")
    checkpoint = CheckpointView(step=2, version=2, path=f"{record.directory}/checkpoints/step-2", at="2026-01-01")
    writes = [
        PutRecord(record),
        PutRecord(SERVICE),
        PutCheckpoint("a", checkpoint),
        AppendAudit(AuditRecord(1.0, "create", "experiments/a")),
    ]
    await store.apply([*writes, AppendEvent("a", "first", 1.0, {})])

    revision = dump_rows(source, tmp_path)  # while it is open
    await store.close()
    restore_rows(database_url, tmp_path, revision, {"a": (record.directory, "/elsewhere/a")})

    restored = await SqlStore.open(database_url)
    assert await restored.experiments() == [replace(record, directory="/elsewhere/a")]
    assert await restored.services() == [], "they register with the gateway that they have"
    assert [each.path for each in await restored.checkpoints("a")] == ["/elsewhere/a/checkpoints/step-2"]
    (second,) = await restored.apply([AppendEvent("a", "second", 2.0, {})])
    assert second.id == 2
    await restored.close()
    with pytest.raises(Conflict, match="restore into an empty one"):
        restore_rows(database_url, tmp_path, revision, {})


async def test_rows_of_a_later_release_and_rows_that_are_missing_are_refused_and_none_is_written(
    database_url: str, tmp_path: Path
) -> None:
    source = f"sqlite:///{tmp_path / 'source.sqlite'}"
    store = await SqlStore.open(source)
    await store.apply([PutRecord(a_record("a"))])
    revision = dump_rows(source, tmp_path)
    await store.close()

    with pytest.raises(InvalidRequest, match="later release"):
        restore_rows(database_url, tmp_path, "9999", {})
    (tmp_path / "publications.jsonl").unlink()
    with pytest.raises(InvalidRequest, match=r"publications\.jsonl"):
        restore_rows(database_url, tmp_path, revision, {})

    restored = await SqlStore.open(database_url)
    assert await restored.experiments() == []
    await restored.close()
