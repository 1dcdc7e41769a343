"""A dump gives back the groups that a run kept, in their order, from whatever names it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from flotilla.shared.config.sections.tracking import SamplesConfig
from flotilla.shared.errors import DataError
from flotilla.shared.samples.dump import check_place, dump_at
from flotilla.shared.samples.folder import SampleFolder, evaluation_name
from flotilla.shared.samples.table import FACTS, REQUIRED, SCHEMA
from flotilla.shared.schemas.sample_kinds import KeptGroup, SampleFile, SampleKind
from tests.unit.samples.builders import a_step


def a_run(directory: Path, *files: SampleFile) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    folder = SampleFolder(directory, SamplesConfig())
    for file in files:
        folder.write(file)
    return directory


def an_evaluation(version: int = 0) -> SampleFile:
    kept = [KeptGroup(each.group, SampleKind.EVALUATION) for each in a_step(num_groups=1, first=90).groups]
    return SampleFile(evaluation_name(version), kept, 0, version, {"num_groups": 1})


def test_groups_come_in_the_order_of_training_and_then_of_evaluations(tmp_path: Path) -> None:
    steps = [a_step(10, num_groups=3, first=7, rewards=(0.0, 0.5, 1.0)), a_step(9, num_groups=2, first=2)]
    run = a_run(tmp_path / "run", *steps, an_evaluation())

    dump = dump_at(run)

    assert [dump.group(index).task.group_id for index in range(len(dump))] == [2, 3, 7, 8, 9, 90]
    assert [dump.place_of(index)[0].name for index in (1, 2, 5)] == [
        "step-00000009.parquet", "step-00000010.parquet", "evaluation-v00000000.parquet",
    ]  # fmt: skip
    found, written = dump.group(4), steps[0].groups[2].group
    assert found.task == written.task
    for one, other in zip(found.trajectories, written.trajectories, strict=True):
        assert (one.reward, one.versions, one.status) == (other.reward, other.versions, other.status)
        assert np.array_equal(one.token_ids, other.token_ids)
        assert np.array_equal(one.log_probs, other.log_probs)
    with pytest.raises(IndexError, match="has 6 groups, no group 6"):
        dump.group(6)


def test_a_run_an_experiment_its_folder_and_a_file_are_all_dumps(tmp_path: Path) -> None:
    experiment = a_run(tmp_path / "runs" / "mine" / "fleet" / "experiments" / "mine-1", a_step(1), a_step(2))

    for path in (tmp_path / "runs" / "mine", experiment, experiment / "samples"):
        assert len(dump_at(path)) == 4
    assert len(dump_at(experiment / "samples" / "step-00000002.parquet")) == 2


def test_what_was_not_trained_is_left_out(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", a_step(1), replace(a_step(2), name="ended-v00000001-trainer-0001.parquet"))

    assert len(dump_at(run)) == 2


def test_errors_say_what_is_there(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for name in ("a-1", "b-1"):
        a_run(run / "fleet" / "experiments" / name, a_step(1))
    (tmp_path / "empty").mkdir()
    (tmp_path / "rows.parquet").write_bytes(b"")
    broken = a_run(tmp_path / "broken", a_step(1), a_step(2))
    (broken / "samples" / "step-00000002.parquet").write_bytes(b"PAR1")

    with pytest.raises(DataError, match=r"several experiments are in .*a-1.*b-1"):
        dump_at(run)
    with pytest.raises(DataError, match="has no groups that were trained or evaluated"):
        dump_at(tmp_path / "empty")
    with pytest.raises(DataError, match=r"data\.dump: .*nowhere does not exist: name the directory of a run or of an"):
        dump_at(tmp_path / "nowhere")
    with pytest.raises(DataError, match="is no file of trained or evaluated samples"):
        dump_at(tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"cannot read .*step-00000002"):
        dump_at(broken)


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", a_step(1))
    other = a_run(tmp_path / "other", a_step(2))
    (run / "samples" / "step-00000002.parquet").symlink_to(other / "samples" / "step-00000002.parquet")

    # stored_files does not look behind a link, and the reader opens none.
    with pytest.raises(DataError, match=r"cannot read .*step-00000002"):
        dump_at(run)


def test_a_file_that_is_removed_meanwhile_is_named(tmp_path: Path) -> None:
    dump = dump_at(run := a_run(tmp_path / "run", a_step(1), a_step(2)))
    dump.group(0)
    (run / "samples" / "step-00000002.parquet").unlink()

    with pytest.raises(DataError, match=r"step-00000002.parquet \(any more\)"):
        dump.group(2)


def test_the_reader_is_told_the_folder_before_anything_is_read(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", a_step(1))

    def refuse(folder: str) -> None:
        raise DataError(f"{folder} is not allowed")

    with pytest.raises(DataError, match=r"run/samples is not allowed"):
        dump_at(run, refuse)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_kept": 2_000_000_000}, "its metadata names 2000000000 groups, and it has 4 rows"),
        ({"num_kept": -3}, "its metadata names -3 groups"),
        ({"num_kept": "9"}, "its metadata names '9' groups"),
        ({"num_kept": 1.5}, "its metadata names 1.5 groups"),
        ({"num_kept": True}, "its metadata names True groups"),
        ({"num_kept": None}, "its metadata names None groups"),
    ],
)
def test_what_a_file_says_about_itself_is_not_believed(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    file = a_run(tmp_path / "run", a_step(1)) / "samples" / "step-00000001.parquet"
    table = parquet.read_table(file)
    parquet.write_table(table.replace_schema_metadata({FACTS: json.dumps({"schema": SCHEMA} | changes).encode()}), file)

    with pytest.raises(DataError, match=words):
        dump_at(tmp_path / "run")


def test_a_file_without_a_column_or_that_unpacks_to_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = a_run(tmp_path / "run", a_step(1)) / "samples" / "step-00000001.parquet"
    table = parquet.read_table(file)
    parquet.write_table(table.drop_columns(["place"]), file)

    with pytest.raises(DataError, match="it has no column place"):
        dump_at(tmp_path / "run")

    parquet.write_table(table, file)
    monkeypatch.setattr("flotilla.shared.samples.dump.MOST_BYTES", 100)
    with pytest.raises(DataError, match="and 100 are allowed"):
        dump_at(tmp_path / "run")


@pytest.mark.parametrize(
    ("column", "value"), [("token_ids", None), ("messages", "{"), ("place", "x"), ("status", "odd"), ("messages", "1")]
)
def test_a_group_that_no_trainer_wrote_is_named(tmp_path: Path, column: str, value: str | None) -> None:
    file = a_run(tmp_path / "run", a_step(1)) / "samples" / "step-00000001.parquet"
    table = parquet.read_table(file)
    wrong = pa.array([value] * table.num_rows, pa.string())
    parquet.write_table(table.set_column(table.schema.get_field_index(column), column, wrong), file)
    dump = dump_at(tmp_path / "run")

    with pytest.raises(DataError, match=r"step-00000001\.parquet (is no group|has no places)"):
        dump.group(0)


def test_required_columns_are_those_that_a_group_cannot_be_made_without(tmp_path: Path) -> None:
    file = a_run(tmp_path / "run", a_step(1)) / "samples" / "step-00000001.parquet"
    table = parquet.read_table(file)

    optional = [name for name in table.column_names if name not in REQUIRED]
    parquet.write_table(table.drop_columns(optional), file)

    assert set(table.column_names) >= REQUIRED
    assert dump_at(tmp_path / "run").group(1).trajectories


def test_all_folders_are_asked_for_before_any_is_named(tmp_path: Path) -> None:
    for name in ("a-1", "b-1"):
        a_run(tmp_path / "fleet" / "experiments" / name, a_step(1))

    def refuse(folder: str) -> None:
        raise DataError(f"no {folder.rpartition('/')[2]}")

    with pytest.raises(DataError, match="no samples"):
        check_place(tmp_path, refuse)
