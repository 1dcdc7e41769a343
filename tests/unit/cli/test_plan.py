"""``flotilla plan``: what it reads of a run's folder, and what it prints."""

import asyncio
import json
import shutil
import sqlite3
import threading
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pyarrow
import pytest
from pyarrow import parquet

from flotilla.cli.command_line import build_parser
from flotilla.cli.commands import plan as command
from flotilla.cli.commands.plan import plan
from flotilla.cli.recorded_run import read_run
from flotilla.services.gateway.store.records import PublicationRecord
from flotilla.services.gateway.store.sql import SqlStore
from flotilla.services.gateway.store.writes import PointRecord, PutMetrics, PutRecord
from flotilla.shared.clock import rfc3339
from flotilla.shared.config.sections.tracking import SamplesConfig
from flotilla.shared.errors import FlotillaError, InvalidRequest
from flotilla.shared.samples.folder import SampleFolder, ended_name, step_name
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.schemas.sample_kinds import KeptGroup, SampleFile, SampleKind
from flotilla.shared.schemas.trajectory import Group
from flotilla.shared.testing.builders import a_group as sampled
from tests.unit.gateway.builders import a_record, spec_document

T, STEPS = 1_000_000.0, range(1, 7)
SERIES = {
    "time/step_seconds": 3.0, "time/wait_seconds": 1.5, "time/compute_seconds": 1.0, "time/publish_seconds": 0.5,
    "time/publication_seconds": 0.75, "publication/commit_seconds": 0.25, "rollouter/cores": 1.25,
    "time/compute_cores": 1.5, "tokens/trained_in_step": 40.0, "lag/mean": 0.5,
}  # fmt: skip


def a_timed_group(number: int, step: int) -> Group:
    group = sampled(number, rewards=[0.0, 1.0])
    issued_at = T + 3 * step - 3
    members = tuple(
        replace(each, timings={"generation_seconds": 1.0, "grading_seconds": 0.125}) for each in group.trajectories
    )
    timed = replace(group, task=replace(group.task, issued_at=issued_at), trajectories=members)
    return timed.timed("generated_after_seconds", issued_at + 1.25).timed("graded_after_seconds", issued_at + 1.5)


async def keep_run(data: Path) -> None:
    """Write what a fleet leaves of six steps of two groups each, of which one more was filtered."""
    data.mkdir()
    spec = spec_document(optimisation={"steps": 6, "groups_per_mini_batch": 2})
    record = a_record("first", name="first", state=ExperimentState.COMPLETED, step=6, directory=str(data / "moved"))
    record = replace(record, spec=spec)
    points = [
        PointRecord(name=name, step=step, version=step - 1, value=value, at=rfc3339(T + 3 * step))
        for step in STEPS
        for name, value in SERIES.items()
    ]
    publication = PublicationRecord(
        experiment_id="first", version=1, step=1, epoch=1, phase="committed", service_id="trainer-1", manifest={},
        members=({"service_id": "a", "rank": 1}, {"service_id": "b", "rank": 2}), rendezvous=None, reason=None,
        announced_at=T + 3, ended_at=T + 4,
    )  # fmt: skip
    store = await SqlStore.open(f"sqlite:///{data / 'gateway.sqlite'}")
    await store.apply([PutRecord(record), PutRecord(publication), PutMetrics("first", points)])
    await store.close()
    directory = data / "experiments" / "first"
    directory.mkdir(parents=True)
    folder = SampleFolder(directory, SamplesConfig())
    for step in STEPS:
        kept = [KeptGroup(a_timed_group(10 * step + each, step), SampleKind.TRAINED) for each in (0, 1)]
        folder.write(SampleFile(step_name(step), kept, step, step - 1, {}))
        ended = [KeptGroup(a_timed_group(10 * step + 2, step), SampleKind.FILTERED, "zero_spread")]
        folder.write(SampleFile(ended_name(step, "reward", 1), ended, None, step, {}))


def test_a_run_is_read_from_what_its_fleet_left(tmp_path: Path) -> None:
    anyio.run(keep_run, tmp_path / "fleet")

    run = anyio.run(read_run, tmp_path)

    assert run.rollouts == 2
    assert [each.step for each in run.steps] == [*STEPS]
    assert run.step_seconds == pytest.approx(3.0) and run.tokens_per_second == pytest.approx(40 / 3) and run.lag == 0.5
    assert (run.publication_seconds, run.switch_seconds) == (0.75, 0.25)
    assert (run.engine_cores, run.trainer_cores) == (1.25, 1.5)
    assert run.filtered_share == pytest.approx(1 / 3), "of the samples, since the ledger was lost"
    (group,) = [each for each in run.groups if each.group_id == 30]
    assert (group.kind, group.generation_seconds, group.grading_seconds) == ("trained", 1.0, 0.125)
    assert (group.started_at - T, group.graded_at - T) == (6.25, 7.5)
    assert group.rewards == (0.0, 1.0) and all(
        total > length > 0 for total, length in zip(group.totals, group.lengths, strict=True)
    )


def test_measured_and_predicted_figures_are_printed_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    anyio.run(keep_run, tmp_path / "fleet")

    def printed(*options: str) -> str:
        arguments = build_parser().parse_args(["plan", str(tmp_path / "fleet"), *options])
        assert anyio.run(plan, arguments) == 0
        return capsys.readouterr().out

    same: dict[str, Any] = json.loads(printed("--json", "--had-cores", "2"))
    slower: dict[str, Any] = json.loads(printed("--json", "--had-cores", "2", "--grading", "100"))
    table = printed("--staleness", "2")

    assert same["predicted"]["step_seconds"] == pytest.approx(same["measured"]["step_seconds"]) == pytest.approx(3.0)
    assert slower["predicted"]["step_seconds"] > 6
    assert "what binds" in table and "trainer waits" in table


def test_a_file_needs_a_probe_and_a_run_needs_none(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text("name: x\n")
    for words in (["plan", str(tmp_path / "spec.yaml")], ["plan", str(tmp_path), "--probe"]):
        with pytest.raises(InvalidRequest, match="--probe"):
            anyio.run(plan, build_parser().parse_args(words))


@pytest.mark.parametrize("option", [["--probe", "1"], ["--lengths", "0"], ["--grading", "-1"], ["--staleness", "nan"]])
def test_numbers_that_mean_nothing_are_refused(option: list[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["plan", "somewhere", *option])


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run, to be copied."""
    place = tmp_path_factory.mktemp("kept") / "run"
    place.mkdir()
    anyio.run(keep_run, place / "fleet")
    return place


def planned(place: Path) -> int:
    return anyio.run(plan, build_parser().parse_args(["plan", str(place), "--json"]))


STEP_ENDS = "WHERE name = 'time/step_seconds'"
COMPUTES = "SET value = {} WHERE name = 'time/compute_seconds'"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("metrics SET at = NULL", "0 recorded steps"),
        (f"metrics SET at = 'zzz' {STEP_ENDS}", "ended at 'zzz'"),
        (f"metrics SET at = (SELECT at FROM metrics {STEP_ENDS} LIMIT 1) {STEP_ENDS}", "end at one time"),
        (f"metrics {COMPUTES.format('0')}", "no time to compute"),
        (f"metrics {COMPUTES.format('1e-300')}", "no time to compute"),
        (f"metrics {COMPUTES.format('-5')}", "time/compute_seconds of step 1 in .* is -5.0"),
        (f"metrics {COMPUTES.format('1e300')}", "is 1e\\+300"),
        ("metrics SET value = 9e999 WHERE name = 'time/wait_seconds'", "finite number"),
        ("metrics SET value = -100 WHERE name = 'time/publication_seconds'", "is -100.0"),
        ("metrics SET value = 0 WHERE name = 'tokens/trained_in_step'", "trained no tokens"),
        ("metrics SET value = 'abc' WHERE name = 'time/wait_seconds'", "gateway.sqlite cannot be read: a series"),
        ("publications SET members = '{}'", "members of a publication are no list"),
        ("publications SET members = '{'", "members of a publication is no JSON"),
        ("experiments SET spec = '[]'", "experiment first is none"),
        ("experiments SET spec = '{'", "an experiment is no JSON"),
        ("experiments SET final_ledger = '[1]'", "a ledger is none"),
    ],
)
def test_a_database_with_damaged_records_is_refused_in_words(
    kept: Path, tmp_path: Path, change: str, words: str
) -> None:
    shutil.copytree(kept, tmp_path / "run")
    database = sqlite3.connect(tmp_path / "run" / "fleet" / "gateway.sqlite")
    database.execute(f"UPDATE {change}")
    database.commit()
    database.close()

    with pytest.raises(FlotillaError, match=words):
        planned(tmp_path / "run")


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "spec.json is no JSON"), ("[1]", "spec.json is no spec"), ("[" * 100_000, "spec.json is no JSON")],
)
def test_a_file_that_is_no_spec_is_refused_by_its_name(kept: Path, tmp_path: Path, text: str, words: str) -> None:
    shutil.copytree(kept, tmp_path / "run")
    (tmp_path / "run" / "fleet" / "experiments" / "first" / "samples" / "spec.json").write_text(text)

    with pytest.raises(InvalidRequest, match=words):
        planned(tmp_path / "run")


def edit_samples(place: Path, edit: Callable[[Any], Any]) -> None:
    for path in (place / "fleet" / "experiments" / "first" / "samples").glob("*.parquet"):
        parquet.write_table(edit(parquet.read_table(path)), path)


def with_column(name: str, value: Any) -> Callable[[Any], Any]:
    def edit(table: Any) -> Any:
        position = table.schema.get_field_index(name)
        values = pyarrow.array([value] * len(table), table.schema.field(position).type)
        return table.set_column(position, name, values)

    return edit


def timings(**changes: float) -> list[tuple[str, float]]:
    named = {"generation_seconds": 1.0, "generated_after_seconds": 1.0, "graded_after_seconds": 2.0}
    return list((named | changes).items())


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda table: table.drop_columns(["timings"]), r"\.parquet has no column timings"),
        (with_column("timings", None), "no samples with times"),
        (with_column("token_ids", None), r"\.parquet has a sample without"),
        (with_column("group_id", None), r"\.parquet has a sample without"),
        (with_column("issued_at", float("nan")), r"issued_at of group \d+ in .*\.parquet is nan"),
        (with_column("issued_at", float("inf")), "is inf"),
        (with_column("num_sampled", -3), "num_sampled of group .* is -3"),
        (with_column("timings", timings(generation_seconds=-1.0)), "generation_seconds of group .* is -1.0"),
        (with_column("timings", timings(generation_seconds=float("nan"))), "generation_seconds of group .* is nan"),
        (with_column("timings", timings(generation_seconds=0.0)), "took no time to sample"),
        (
            lambda table: table.set_column(0, "token_ids", pyarrow.array([1] * len(table))).select([0]),
            r"\.parquet has no column",
        ),
    ],
)
def test_samples_with_damaged_records_are_refused_by_their_file(
    kept: Path, tmp_path: Path, edit: Callable[[Any], Any], words: str
) -> None:
    shutil.copytree(kept, tmp_path / "run")
    edit_samples(tmp_path / "run", edit)

    with pytest.raises(InvalidRequest, match=words):
        planned(tmp_path / "run")


def test_token_ids_are_counted_where_they_are(kept: Path, tmp_path: Path) -> None:
    shutil.copytree(kept, tmp_path / "run")
    edit_samples(tmp_path / "run", with_column("token_ids", [7] * 200_000))

    tracemalloc.start()
    try:
        run = anyio.run(read_run, tmp_path / "run")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert {total for group in run.groups for total in group.totals} == {200_000}
    assert most < 6 << 20, "4 samples of a file are 6.4 MB as lists"


def test_a_simulation_ends_with_who_waits_for_it(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def endless(*_: object) -> None:
        begun.set()
        may_end.wait(20)
        ended.set()

    async def interrupted() -> None:
        task = asyncio.create_task(plan(build_parser().parse_args(["plan", str(kept), "--json"])))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        task.cancel()
        await task

    monkeypatch.setattr(command, "predict", endless)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(interrupted())
    is_over = ended.is_set()
    may_end.set()

    assert not is_over, "the process was kept until the simulation had ended"
