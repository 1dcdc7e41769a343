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


@pytest.mark.parametrize(
    ("where", "part", "ids"),
    [
        ("RUN/fleet/experiments/*/samples/*.jsonl", Part.SAMPLES, ["a-1", "b-1"]),
        ("RUN/fleet/experiments/a*/samples/*.jsonl", Part.SAMPLES, ["a-1"]),
        ("RUN/fl*/experiments/a-1/samples/x.jsonl", Part.SAMPLES, ["a-1"]),
        ("RUN/fleet/experiments/a-1/s*/x.jsonl", Part.RUN, ["a-1"]),
        ("RUN/fleet/experiments/a-1/logs/*.jsonl", Part.LOGS, ["a-1"]),
        ("RUN/**/x.jsonl", Part.RUN, ["a-1", "b-1"]),
        ("RUN/fleet/experiments/**/x.jsonl", Part.RUN, ["a-1", "b-1"]),
        ("RUN/elsewhere/*/../../fleet/x.jsonl", Part.RUN, ["a-1", "b-1"]),
        ("RUN", Part.RUN, ["a-1", "b-1"]),
        ("RUN/fleet/experiments", Part.RUN, ["a-1", "b-1"]),
        ("RUN/rows/*.jsonl", Part.RUN, []),
        ("RUN/*.jsonl", Part.RUN, []),
    ],
)
def test_a_pattern_or_a_folder_above_needs_all_that_it_can_mean(
    tmp_path: Path, where: str, part: Part, ids: list[str]
) -> None:
    spec = a_spec_of(data={"path": where.replace("RUN", str(tmp_path))})
    records = [a_record("a-1"), a_record("b-1"), a_record("c-1", spec=spec)]

    needed = found(records, tmp_path / "fleet" / "experiments")

    assert sorted({(to, needs) for by, to, needs, _ in needed if by == "c-1"}) == [(each, part) for each in ids]


@pytest.mark.parametrize("where", ["RUN", "RUN/fleet/experiments/a-1", "file://RUN/fleet/experiments/a-1/samples"])
def test_a_run_that_is_anothers_dump_stays(tmp_path: Path, where: str) -> None:
    spec = a_spec_of(data={"dump": where.replace("RUN", str(tmp_path))})

    (only,) = references([a_record("a-1"), a_record("c-1", spec=spec)], tmp_path / "fleet" / "experiments")

    assert (only.by, only.to) == ("c-1", "a-1")
    assert only.protects(Part.SAMPLES) and only.protects(Part.RUN)
