"""Which fields of a record are written again: those that are not the same, which is more than those that differ."""

from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy.dialects import sqlite

from flotilla.services.gateway.store.records import PublicationRecord
from flotilla.services.gateway.store.statements import RowWriter, row_of
from flotilla.services.gateway.store.writes import DeleteExperiment, PutRecord
from tests.unit.gateway.builders import a_record


@pytest.mark.parametrize(("before", "after"), [(1, True), (1, 1.0), (0, False), (0.0, 0)])
def test_a_value_of_another_type_in_a_document_is_written(before: Any, after: Any) -> None:
    old = replace(a_record(), spec={"tracking": {"a": [before]}})
    new = replace(old, spec={"tracking": {"a": [after]}})

    assert list(row_of(new, since=old)) == ["spec"]
    assert repr(row_of(new, since=old)["spec"]["tracking"]["a"]) == repr([after])


def test_only_what_was_replaced_is_written() -> None:
    old = a_record()

    assert row_of(replace(old, step=old.step), since=old) == {}
    assert row_of(replace(old, step=old.step + 1), since=old) == {"step": old.step + 1}
    assert row_of(replace(old, name="".join(old.name)), since=old) == {}, "plain values are compared"


class Noted:
    """A connection that notes what rows are written."""

    dialect = sqlite.dialect()

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def execute(self, _statement: Any, row: dict[str, Any] | None = None) -> None:
        self.rows.append(row or {})


def a_publication(version: int = 1, **changes: Any) -> PublicationRecord:
    manifest = {"tensors": [{"name": "w"}]}
    made = PublicationRecord("tiny-1", version, 1, 1, "transferring", "t", manifest, [], None, None, 1.0, None)
    return replace(made, **changes)


def test_of_a_publication_only_what_has_changed_is_written_again() -> None:
    connection, writer = Noted(), RowWriter()
    first, other = a_publication(), a_publication(version=2)

    def write(*records: PublicationRecord, is_stored: bool = True) -> list[dict[str, Any]]:
        connection.rows.clear()
        writer.write(connection, [PutRecord(each) for each in records])  # type: ignore[arg-type]
        if is_stored:
            writer.are_stored()
        return list(connection.rows)

    committed = replace(first, phase="committed", ended_at=2.0)
    assert write(first) == [row_of(first)]
    assert write(committed, is_stored=False) == [
        {"phase": "committed", "ended_at": 2.0, "key_experiment_id": "tiny-1", "key_version": 1}
    ]
    # What was not stored is written again.
    assert write(committed)[0]["phase"] == "committed"
    assert write(committed) == []
    assert write(other) == [row_of(other)]
    assert write(committed) == [row_of(committed)], "nobody remembers the one before the last"
    writer.write(connection, [DeleteExperiment("tiny-1")])  # type: ignore[arg-type]
    writer.are_stored()
    assert write(committed) == [row_of(committed)]
