"""Who needs what an experiment left."""

from pathlib import Path
from typing import Any

import pytest

from flotilla.services.gateway.retention.references import references
from flotilla.services.gateway.store.records import ExperimentRecord
from flotilla.shared.schemas.retention import Part
from tests.unit.gateway.builders import a_record, a_spec


def a_spec_of(**changes: Any) -> dict[str, Any]:
    """Make a spec as a record has it."""
    return a_spec(**changes).model_dump(mode="json")


def found(records: list[ExperimentRecord], root: Path) -> list[tuple[str, str, Part, str]]:
    """List the references between experiments."""
    return [(each.by, each.to, each.part, each.words) for each in references(records, root)]


def test_a_fork_needs_the_checkpoints_that_it_began_from(tmp_path: Path) -> None:
    origin = {"experiment_id": "parent", "step": 4, "version": 3, "path": "/nowhere", "first_group_id": 0}

    records = [
        a_record("parent"),
        a_record("child", origin=origin),
        a_record("far", origin=origin | {"experiment_id": "gone"}),
    ]

    assert found(records, tmp_path) == [("child", "parent", Part.CHECKPOINTS, "child began from its step 4")]


def test_a_spec_needs_what_it_names_below_another_experiments_directory(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").symlink_to(tmp_path / "experiments" / "a" / "samples")
    root = tmp_path / "experiments"
    model, data = f"{root}/a/checkpoints/step-00000004/model", f"{tmp_path}/elsewhere/rows.jsonl"

    records = [a_record("a"), a_record("b", spec=a_spec_of(model={"path": model}, data={"path": data}))]

    assert found(records, root) == [
        ("b", "a", Part.CHECKPOINTS, f"model.path of b names {model}"),
        ("b", "a", Part.SAMPLES, f"data.path of b names {data}"),
    ]


@pytest.mark.parametrize("where", ["a@4", "a", "ROOT/a@4", "ROOT/a/checkpoints/step-00000004"])
def test_a_checkpoint_that_a_spec_begins_from_is_needed_however_it_is_named(tmp_path: Path, where: str) -> None:
    spec = a_spec_of(checkpoint={"resume_from": where.replace("ROOT", str(tmp_path))})

    (only,) = references([a_record("a"), a_record("b", spec=spec)], tmp_path)

    assert (only.by, only.to) == ("b", "a")
    assert only.protects(Part.CHECKPOINTS)


def test_nobody_refers_to_oneself_or_to_what_is_not_there(tmp_path: Path) -> None:
    own = a_spec_of(model={"path": f"{tmp_path}/a/export"}, data={"path": f"{tmp_path}/gone/rows.jsonl"})

    assert found([a_record("a", spec=own)], tmp_path) == []


def test_all_of_a_directory_that_is_named_stays(tmp_path: Path) -> None:
    (only,) = references([a_record("a"), a_record("b", spec=a_spec_of(model={"path": f"{tmp_path}/a"}))], tmp_path)

    assert all(only.protects(part) for part in Part)


def test_a_run_stays_for_any_of_its_parts_and_a_part_for_itself_alone(tmp_path: Path) -> None:
    (only,) = references([a_record("a"), a_record("b", spec=a_spec_of(model={"path": f"{tmp_path}/a/x"}))], tmp_path)

    assert [part for part in Part if only.protects(part)] == [Part.RUN, Part.LOGS]
