"""Samples in files: the same groups back, whole or not there at all, within bounds, and never in the way."""

import errno
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

from flotilla.shared.config.sections.tracking import SamplesConfig
from flotilla.shared.samples import recorder as recorder_module
from flotilla.shared.samples.folder import SAMPLES, SampleFolder, StoredFile, beyond, step_name, stored_files
from flotilla.shared.samples.recorder import MOST_WAITING, SampleRecorder
from flotilla.shared.samples.table import facts_of, to_groups, to_table
from flotilla.shared.schemas.routing import RoutedExperts
from flotilla.shared.schemas.sample_kinds import KeptGroup, SampleFile, SampleKind
from flotilla.shared.schemas.trajectory import FinishReason, GradeStatus, Group
from flotilla.shared.schemas.turns import Turn
from flotilla.shared.streams.intervals import IntervalSet
from flotilla.shared.testing.builders import a_group, a_task, a_trajectory
from tests.unit.samples.builders import a_step, trained_tokens

TWO_TURNS = (
    Turn(0, 3, 4, FinishReason.STOP, "left", reward=-0.1, state=2**62),
    Turn(4, 6, 8, FinishReason.LENGTH, "up", "a wall\n", reward=None),
)


def assert_same(found: KeptGroup, expected: KeptGroup) -> None:
    assert (found.kind, found.reason, found.group.task, found.group.prompt) == (
        expected.kind,
        expected.reason,
        expected.group.task,
        expected.group.prompt,
    )
    for one, other in zip(found.group.trajectories, expected.group.trajectories, strict=True):
        assert one.sampled_to_wire() == other.sampled_to_wire()
        assert one.grade_to_wire() == other.grade_to_wire()
    for mine, theirs in zip(found.tokens, expected.tokens or [None] * len(found.tokens), strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            np.testing.assert_array_equal(mine.advantages, theirs.advantages)
            np.testing.assert_array_equal(mine.log_probs, theirs.log_probs)
            assert tuple(mine.lags) == tuple(theirs.lags)


def test_a_file_gives_back_the_very_same_groups(tmp_path: Path) -> None:
    task = a_task(7, row=3, group_size=4, metadata={"difficulty": 0.25, "tags": ["ä"]}, data_source="math", seed=2**62)
    task = replace(task, settings={"rollout.sampling.temperature": 0.7, "rollout.group_size": 4})
    members = (
        a_trajectory(reward=0.1 + 0.2, versions=((0, 3), (5, 4)), text="zwölf\n", timings={"generation_seconds": 0.5}),
        a_trajectory(finish_reason=FinishReason.LENGTH).graded(GradeStatus.ERROR, None, reason="timed out"),
        a_trajectory(sampled_tokens=0).graded(
            GradeStatus.SCORED, 0.0, components={"length": -1.0}, metrics={"exact/x": 2.0}
        ),
        a_trajectory(turns=TWO_TURNS, is_baseline=True, episode="e1", finish_reason=FinishReason.TURNS).graded(
            GradeStatus.SCORED, 0.0
        ),
    )
    length = len(members[0].token_ids)
    drawn = np.random.default_rng(0).random((length - 1, 2, 8)).argsort(-1)[..., :2]
    members = (replace(members[0], experts=RoutedExperts.of(drawn, 8)), *members[1:])
    first = KeptGroup(
        Group(task, members, "the prompt"), SampleKind.TRAINED, None, [trained_tokens(members[0]), None, None, None]
    )
    second = KeptGroup(a_group(9, rewards=[0.0, 0.0]), SampleKind.FILTERED, "zero_spread")
    file = SampleFile(
        "step-00000012.parquet", [first, second], 12, 4, {"parent": "root", "metrics": {"loss/total": 0.1}}
    )

    SampleFolder(tmp_path, SamplesConfig()).write(file)

    table = parquet.read_table(tmp_path / SAMPLES / file.name)
    found = to_groups(table)
    assert_same(found[0], first)
    assert_same(found[1], second)
    facts = facts_of(table.schema.metadata)
    assert (facts["step"], facts["version"], facts["metrics"]) == (12, 4, {"loss/total": 0.1})
    assert table.column("reward").to_pylist() == [0.1 + 0.2, None, 0.0, 0.0, 0.0, 0.0]


def test_a_file_of_another_schema_is_refused() -> None:
    table = to_table(a_step()).replace_schema_metadata({b"flotilla": b'{"schema": 99}'})

    with pytest.raises(ValueError, match="schema 99"):
        to_groups(table)


def test_a_step_that_is_trained_again_replaces_its_file_at_once(tmp_path: Path) -> None:
    folder = SampleFolder(tmp_path, SamplesConfig())
    folder.write(a_step(3, first=0))
    folder.write(a_step(3, first=10))

    [file] = stored_files(tmp_path / SAMPLES)
    found = to_groups(parquet.read_table(tmp_path / SAMPLES / file.name))
    assert [kept.group.task.group_id for kept in found] == [10, 11]
    assert len(list((tmp_path / SAMPLES).iterdir())) == 1, "nothing temporary is left"


def test_what_a_lost_lineage_wrote_is_removed(tmp_path: Path) -> None:
    folder = SampleFolder(tmp_path, SamplesConfig())
    for step in (1, 2, 3):
        folder.write(a_step(step))
    for version in (1, 2):
        folder.write(replace(a_step(), name=f"evaluation-v{version:08d}.parquet"))

    assert folder.forget(after_step=2, lost=IntervalSet([2])) == 2

    assert {(file.family, file.number) for file in stored_files(folder.path)} == {
        ("step", 1),
        ("step", 2),
        ("evaluation", 1),
    }


def test_a_flood_of_one_family_removes_no_other() -> None:
    files = [StoredFile("evaluation-v00000000.parquet", "evaluation", 0, 10, 0)]
    files += [StoredFile(step_name(step), "step", step, 20, step) for step in range(1, 6)]

    gone = beyond(files, 60)

    assert [file.number for file in gone] == [1, 2, 3]
    assert all(file.family == "step" for file in gone)


def test_files_stay_within_their_bytes_and_age(tmp_path: Path) -> None:
    most = 1024**2
    folder = SampleFolder(tmp_path, SamplesConfig(max_bytes=most))
    for step in range(1, 10):
        folder.write(a_step(step, num_groups=3, sampled_tokens=1500, seed=100 * step))

    files = list(stored_files(folder.path))
    assert sum(file.size_bytes for file in files) <= most
    assert len(files) > 1
    assert min(file.number for file in files) > 1, "the oldest went"

    aged = SampleFolder(tmp_path, SamplesConfig(max_age_hours=1e-9))
    aged.write(a_step(9999))
    assert len(list(stored_files(folder.path))) <= 1


def a_recorder(directory: Path, problems: list[str | None] | None = None, **config: Any) -> SampleRecorder:
    told = problems if problems is not None else []
    return SampleRecorder(directory, SamplesConfig(**config), writer="test", on_problem=told.append)


def test_a_full_disk_is_named_and_leaves_training_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problems: list[str | None] = []
    recorder = a_recorder(tmp_path, problems).start()
    write = SampleFolder.write

    def full(self: SampleFolder, file: SampleFile) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SampleFolder, "write", full)
    recorder.keep(lambda: a_step(1))
    recorder.keep(lambda: a_step(2))
    assert recorder.flush(5)
    monkeypatch.setattr(SampleFolder, "write", write)
    recorder.keep(lambda: a_step(3))
    recorder.close()

    assert problems == ["samples cannot be written: No space left on device", None]
    assert recorder.lost_files == 2
    assert [file.number for file in stored_files(tmp_path / SAMPLES)] == [3]


def test_a_machine_without_the_directory_keeps_nothing_and_says_so(tmp_path: Path) -> None:
    problems: list[str | None] = []
    recorder = a_recorder(tmp_path / "of another machine", problems).start()

    recorder.keep(lambda: a_step(1))
    recorder.close()

    assert problems == ["samples cannot be written: No such file or directory"]
    assert not (tmp_path / "of another machine").exists()


def test_a_slow_disk_holds_nobody_back(tmp_path: Path) -> None:
    problems: list[str | None] = []
    recorder = a_recorder(tmp_path, problems).start()
    may_write = threading.Event()

    def slow() -> SampleFile:
        may_write.wait(10)
        return a_step(1)

    kept = [recorder.keep(slow) for _ in range(MOST_WAITING + 3)]
    may_write.set()
    recorder.close()

    assert kept[0] and not kept[-1]
    assert problems[0] == "samples come faster than they can be written"
    assert problems[-1] is None


def test_groups_that_end_otherwise_are_kept_up_to_a_number_per_version_and_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "BATCH_SECONDS", 0.01)
    recorder = a_recorder(tmp_path, ended_per_version=2).start()

    for number in range(5):
        recorder.ended(a_group(number, rewards=[0.0, 0.0], version=1), SampleKind.FILTERED, "zero_spread")
    recorder.ended(a_group(9, rewards=[0.0, 0.0], version=1), SampleKind.FAILED, "grading_error")
    assert recorder.flush(5)
    recorder.ended(a_group(10, rewards=[0.0, 0.0], version=2), SampleKind.FILTERED, "zero_spread")
    recorder.close()

    tables = [parquet.read_table(tmp_path / SAMPLES / file.name) for file in stored_files(tmp_path / SAMPLES)]
    kept = [group for table in tables for group in to_groups(table)]
    assert sorted((each.group.task.group_id, each.kind.value, each.reason) for each in kept) == [
        (0, "filtered", "zero_spread"),
        (1, "filtered", "zero_spread"),
        (9, "failed", "grading_error"),
        (10, "filtered", "zero_spread"),
    ]


def test_pandas_is_not_imported_to_lay_samples_out_and_is_there_for_who_asks() -> None:
    program = """
import sys
from tests.unit.samples.builders import a_step
from flotilla.shared.samples.table import to_table
assert "pandas" not in sys.modules
table = to_table(a_step())
assert "pandas" not in sys.modules
try:
    import pandas
except ModuleNotFoundError:
    sys.exit()
assert len(table.to_pandas()) == table.num_rows
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
