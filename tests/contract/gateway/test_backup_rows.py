"""Rows of a database come back in a database of either kind, under another directory, and numbers go on."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from flotilla.backup.rows import dump_rows, restore_rows
from flotilla.services.gateway.store.records import AuditRecord, StoredAnswer
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
        restore_rows(database_url, tmp_path, revision, {"a": ("/nowhere/a", "/b/a")})

    restored = await SqlStore.open(database_url)
    assert await restored.experiments() == []
    await restored.close()


FORGED = [
    {"path": "/nowhere/a/checkpoints/../../b/checkpoints/step-2"},
    {"path": "/nowhere/a/checkpoints/.."},
    {"path": "/nowhere/a/checkpoints/"},
    {"path": "/nowhere/a/checkpoints"},
    {"path": "/nowhere/a/checkpoints/step-2/model"},
    {"path": "/nowhere/ab/checkpoints/step-2"},
    {"path": "/etc"},
    {"path": "checkpoints/step-2"},
    {"path": "/nowhere/a/checkpoints/step-2\n"},
]


@pytest.mark.parametrize("forged", FORGED, ids=lambda each: str(each["path"]))
async def test_a_checkpoint_outside_of_its_experiment_is_refused_and_nothing_is_written(
    tmp_path: Path, forged: dict[str, str]
) -> None:
    source, target = f"sqlite:///{tmp_path / 'source.sqlite'}", f"sqlite:///{tmp_path / 'target.sqlite'}"
    store = await SqlStore.open(source)
    checkpoint = CheckpointView(step=2, version=2, path="/nowhere/a/checkpoints/step-2", at="2026-01-01")
    await store.apply([PutRecord(a_record("a")), PutCheckpoint("a", checkpoint)])
    revision = dump_rows(source, tmp_path)
    await store.close()
    rows = [json.loads(line) | forged for line in (tmp_path / "checkpoints.jsonl").read_text().splitlines()]
    (tmp_path / "checkpoints.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))

    with pytest.raises(InvalidRequest, match="is no checkpoint of an experiment"):
        restore_rows(target, tmp_path, revision, {"a": ("/nowhere/a", "/elsewhere/a")})

    restored = await SqlStore.open(target)
    assert await restored.experiments() == [] and await restored.checkpoints("a") == []
    await restored.close()


async def test_answers_come_back_with_rights_alone_and_rows_of_other_experiments_never(tmp_path: Path) -> None:
    source = f"sqlite:///{tmp_path / 'source.sqlite'}"
    store = await SqlStore.open(source)
    answer = StoredAnswer("operator POST /v1/experiments key", "digest", 201, "application/json", "{}", 1.0)
    await store.apply([PutRecord(a_record("a")), PutRecord(answer), AppendEvent("a", "first", 1.0, {})])
    revision = dump_rows(source, tmp_path)
    await store.close()
    with (tmp_path / "events.jsonl").open("a") as file:
        row = json.loads((tmp_path / "events.jsonl").read_text().splitlines()[0])
        file.write(json.dumps(row | {"id": 99, "experiment_id": "of-tomorrow"}) + "\n")

    found = {}
    for with_rights in (False, True):
        target = f"sqlite:///{tmp_path / f'target-{with_rights}.sqlite'}"
        restore_rows(target, tmp_path, revision, {"a": ("/nowhere/a", "/b/a")}, with_rights=with_rights)
        restored = await SqlStore.open(target)
        found[with_rights] = await restored.answer(answer.key)
        assert [each.type for each in await restored.events("a", after=0, limit=10)] == ["first"]
        assert await restored.events("of-tomorrow", after=0, limit=10) == []
        await restored.close()
    assert found == {False: None, True: answer}
