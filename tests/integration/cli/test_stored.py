"""What a gateway has left in a directory is reported without it, as it would report it."""

import asyncio
import json
import re
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flotilla.cli.__main__ import main
from flotilla.cli.exit_codes import ExitCode
from flotilla.services.gateway.store.sql import SqlStore
from flotilla.services.gateway.store.writes import PointRecord, PutCheckpoint, PutMetrics, PutRecord, PutWindow, Write
from flotilla.services.gateway.uploads.uploads import WINDOW
from flotilla.shared.config.sections.tracking import SamplesConfig
from flotilla.shared.samples.folder import SampleFolder
from flotilla.shared.schemas.experiment import CheckpointView, ExperimentState, UploadedCheckpoint, UploadRecord
from tests.unit.gateway.builders import a_record
from tests.unit.samples.builders import a_step

LEDGER = {"train": {"issued": 8, "trained": 8, "balanced": True, "tokens": {"generated": 70, "trained": 64}}}


def a_run(path: Path, name: str = "tiny-1", **changes: Any) -> Path:
    """Make what `flotilla run` leaves, and move it: the database names the directory where it was made."""
    data = path / "fleet"
    directory = data / "experiments" / name
    (directory / "checkpoints" / "step-00000002" / "model").mkdir(parents=True)
    SampleFolder(directory, SamplesConfig()).write(a_step(2, rewards=(1.0, 0.0)))
    usual = {"state": ExperimentState.COMPLETED, "step": 2, "final_ledger": LEDGER, "updated_at": 126.0}
    points = [
        PointRecord(name=series, step=step, version=step, value=value)
        for series, step, value in (("reward/mean", 1, 0.25), ("reward/mean", 2, 0.5), ("lag/max", 2, 1.0))
    ]
    made = CheckpointView(step=2, version=2, path="/before/checkpoints/step-00000002", at="2026-01-01T00:00:00Z")
    record = a_record(name, directory="/before", **(usual | changes))
    asyncio.run(store_in(data, [PutRecord(record), PutMetrics(name, points), PutCheckpoint(name, made)]))
    return path


async def store_in(data: Path, writes: Sequence[Write]) -> None:
    store = await SqlStore.open(f"sqlite:///{data / 'gateway.sqlite'}")
    try:
        await store.apply(writes)
    finally:
        await store.close()


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("inside", ["", "fleet", "fleet/experiments/tiny-1"])
def test_a_directory_is_reported_as_the_experiment_that_it_holds(
    inside: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = str(a_run(tmp_path / "run") / inside)

    summary = asked(capsys, "report", place)
    (checkpoint,) = asked(capsys, "checkpoints", place)

    assert summary["run"] == (None if inside else place)
    assert (summary["status"], summary["steps"], summary["tokens_trained"]) == ("completed", 2, 64)
    assert (summary["reward"], summary["wall_seconds"]) == (0.375, 125.0)
    assert [sample["reward"] for sample in summary["samples"]] == [1.0, 0.0]
    assert Path(summary["checkpoint"]).is_relative_to(tmp_path) and checkpoint["is_kept"]
    assert summary["logs"] == str(tmp_path / "run" / "fleet" / "logs") or inside


def test_a_directory_says_whether_the_copies_of_its_checkpoints_are_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = a_run(tmp_path / "run")
    done = {"2": UploadedCheckpoint(at="2026-01-01T00:00:00Z", digest="")}
    record = UploadRecord(url="s3://team/tiny-1", local=(2,), uploaded=done)
    asyncio.run(store_in(path / "fleet", [PutWindow("tiny-1", WINDOW, record.model_dump(mode="json"))]))

    (checkpoint,) = asked(capsys, "checkpoints", str(path))

    assert checkpoint["upload"] == record.view_of(2).model_dump(mode="json")
    assert checkpoint["upload"]["state"] == "uploaded"
    assert main(["checkpoints", str(path), "--verify"]) == ExitCode.UNREACHABLE
    assert "only its gateway looks there now" in capsys.readouterr().err


def test_runs_in_different_directories_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = a_run(tmp_path / "one"), a_run(tmp_path / "two", "tiny-2", step=1)

    found = asked(capsys, "compare", str(one), str(two), "--metric", "reward/mean")

    assert [each["id"] for each in found["experiments"]] == ["tiny-1", "tiny-2"]
    assert found["metrics"] == [{"name": "reward/mean", "step": 2, "values": [0.5, 0.5]}]


def test_a_data_directory_without_a_fleet_is_read_and_one_without_experiments_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FLOTILLA_GATEWAY_URL", raising=False)
    state: dict[str, Any] = {"state": ExperimentState.RUNNING, "final_ledger": None}
    data = str(a_run(tmp_path / "run", **state) / "fleet")

    assert main(["report", "tiny", "--data", data, "--plot", str(tmp_path / "x.png")]) == 0
    said = capsys.readouterr().out
    assert "its fleet does not run now" in said and "creation to last word" in said
    assert "ledger  " not in said and "tokens" not in said

    assert main(["report", "other", "--data", data]) == ExitCode.NOT_FOUND
    assert main(["report", str(tmp_path)]) == ExitCode.NOT_FOUND
    assert main(["report", str(tmp_path / "nowhere")]) == ExitCode.NOT_FOUND
    assert main(["ledger", "tiny", "--data", data]) == ExitCode.UNREACHABLE
    said = capsys.readouterr().err
    assert f"there are no experiments in {tmp_path}" in said and f"there is no directory {tmp_path}/nowhere" in said


def test_a_directory_stays_as_a_killed_gateway_left_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = a_run(tmp_path / "run") / "fleet"
    killed = tmp_path / "killed" / "fleet"

    async def kill() -> None:
        store = await SqlStore.open(f"sqlite:///{data / 'gateway.sqlite'}")
        await store.apply([PutMetrics("tiny-1", [PointRecord(name="reward/mean", step=3, version=3, value=0.9)])])
        shutil.copytree(data, killed)
        await store.close()

    asyncio.run(kill())
    assert (killed / "gateway.sqlite-wal").stat().st_size > 0
    before = {path: path.read_bytes() for path in killed.glob("gateway*")}

    assert asked(capsys, "report", str(killed.parent))["reward"] == pytest.approx((0.25 + 0.5 + 0.9) / 3)

    assert {path: path.read_bytes() for path in killed.glob("gateway*")} == before


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        (None, "cannot be read: file is not a database"),
        ("DROP TABLE experiments", "cannot be read: no such table: experiments"),
        ("UPDATE checkpoints SET path = '/etc'", "names a checkpoint /etc, which is not in"),
        (
            "UPDATE checkpoints SET path = directory || '/../../etc' FROM experiments",
            "names a checkpoint .*/etc, which",
        ),
    ],
)
def test_a_database_that_cannot_be_believed_is_refused_in_a_sentence(
    statement: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = a_run(tmp_path / "run")
    database = path / "fleet" / "gateway.sqlite"
    if statement is None:
        database.write_bytes(b"no database " * 1000)
    else:
        with closing(sqlite3.connect(database)) as connection, connection:
            connection.execute(statement)

    assert main(["checkpoints", str(path)]) == ExitCode.UNREACHABLE

    error = capsys.readouterr().err
    assert re.search(rf"{database} cannot be read: .*{said.removeprefix('cannot be read: ')}", error)


def test_no_files_are_shown_of_a_directory_that_only_the_database_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = a_run(tmp_path / "other") / "fleet" / "experiments" / "tiny-1"
    path = a_run(tmp_path / "run")
    with closing(sqlite3.connect(path / "fleet" / "gateway.sqlite")) as connection, connection:
        connection.execute("UPDATE experiments SET directory = ?", (str(other),))
        connection.execute("UPDATE checkpoints SET path = ?", (str(other / "checkpoints"),))
    shutil.rmtree(path / "fleet" / "experiments")

    assert asked(capsys, "report", str(path))["samples"] == []
