"""The timeline of a run: rows, slices and flows of the trace format."""

import json
import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import pytest

from flotilla.cli.command_line import build_parser
from flotilla.cli.commands.timeline import timeline
from flotilla.cli.timeline import GroupTimes, Occurrence, PublicationTimes, StepTimes, timeline_of
from flotilla.services.gateway.store.records import PublicationRecord
from flotilla.services.gateway.store.sql import SqlStore
from flotilla.services.gateway.store.writes import AppendEvent, PointRecord, PutMetrics, PutRecord
from flotilla.shared.clock import rfc3339
from flotilla.shared.config.sections.tracking import SamplesConfig
from flotilla.shared.errors import Unavailable
from flotilla.shared.samples.folder import SampleFolder, step_name
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.schemas.sample_kinds import KeptGroup, SampleFile, SampleKind
from flotilla.shared.testing.builders import a_group as sampled
from tests.unit.gateway.builders import a_record

T = 1_000_000.0


def a_group(group_id: int = 0, **changes: Any) -> GroupTimes:
    given: dict[str, Any] = {
        "group_id": group_id, "kind": "trained", "step": 1, "version": 0, "issued_at": T, "generated_at": T + 2,
        "generation_seconds": 1.5, "graded_at": T + 3, "grading_seconds": 0.5,
    }  # fmt: skip
    return GroupTimes(**(given | changes))


STEP = StepTimes(step=1, version=0, ended_at=T + 10, seconds={"wait": 4.0, "compute": 3.0, "publish": 1.0})


def made(*groups: GroupTimes, **more: Any) -> list[dict[str, Any]]:
    given: dict[str, Any] = {"steps": [STEP], "publications": [], "events": []} | more
    events: list[dict[str, Any]] = timeline_of(groups, **given)["traceEvents"]
    return events


def slices(events: list[dict[str, Any]]) -> dict[tuple[int, int, str], tuple[int, int]]:
    return {(e["pid"], e["tid"], e["name"]): (e["ts"], e["dur"]) for e in events if e["ph"] == "X"}


def flow(events: list[dict[str, Any]], number: int) -> list[tuple[str, int, int]]:
    return [(e["ph"], e["pid"], e["ts"]) for e in events if e["ph"] in "stf" and e["id"] == number]


def test_a_trained_group_flows_from_its_issue_into_its_step() -> None:
    events = made(a_group())

    found = slices(events)
    assert found[1, 1, "group 0"] == (0, 500)
    assert found[2, 1, "group 0"] == (500_000, 1_500_000)
    assert found[3, 1, "group 0"] == (2_500_000, 500_000)
    assert found[4, 1, "step 1"] == (2_000_000, 8_000_000)
    assert found[4, 1, "compute"] == (6_000_000, 3_000_000)
    assert flow(events, 0) == [("s", 1, 0), ("t", 2, 500_000), ("t", 3, 2_500_000), ("f", 4, 6_000_000)]


def test_slices_of_one_row_do_not_overlap() -> None:
    groups = [a_group(number, generated_at=T + 2 + 0.4 * number, generation_seconds=1.0) for number in range(9)]

    rows: dict[int, list[tuple[int, int]]] = {}
    for (pid, tid, _), (at, duration) in slices(made(*groups)).items():
        if pid == 2:
            rows.setdefault(tid, []).append((at, at + duration))

    assert len(rows) == 3, "one second each, 0.4 s apart"
    for row in rows.values():
        row.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(row))


def test_a_filtered_group_ends_with_its_grading_and_says_why() -> None:
    events = made(a_group(kind="filtered", step=None, ended="zero_spread", reward=0.5))

    assert [(phase, pid) for phase, pid, _ in flow(events, 0)] == [("s", 1), ("t", 2), ("f", 3)]
    (graded,) = [e for e in events if e["ph"] == "X" and e["pid"] == 3]
    assert graded["args"] == {
        "kind": "filtered", "version": 0, "ended": "zero_spread", "reward": 0.5, "samples": 0, "tokens": 0,
    }  # fmt: skip


def test_a_group_of_an_evaluation_is_another_than_the_one_of_its_number() -> None:
    evaluated = a_group(7, kind="evaluation", step=None)

    events = made(a_group(7), evaluated)

    assert Counter(e["name"] for e in events if e["ph"] == "X" and e["pid"] == 2) == {
        "group 7": 1,
        "evaluated group 7": 1,
    }
    assert len(flow(events, 14)) == 4 and len(flow(events, 15)) == 3


def test_a_group_whose_times_nobody_kept_is_issued_and_flows_nowhere() -> None:
    events = made(a_group(generated_at=None, graded_at=None, kind="filtered", step=None))

    assert [e["pid"] for e in events if e["ph"] == "X" and e["name"] == "group 0"] == [1]
    assert flow(events, 0) == []


def test_publications_evaluations_and_events_are_on_the_gateways_rows() -> None:
    publication = PublicationTimes(
        version=1, phase="committed", announced_at=T + 5, ended_at=T + 6,
        seconds={"prepare": 0.25, "transfer": 0.5, "commit": 3.0},
    )  # fmt: skip
    events = made(
        publications=[publication],
        events=[
            Occurrence(type="evaluation", at=T + 9, data={"version": 1, "seconds": 2.0, "metrics": {}}),
            Occurrence(type="service_left", at=T + 4, data={"service_id": "r", "more": {"no": "scalar"}}),
            Occurrence(type="publication_committed", at=T + 6, data={"version": 1}),
        ],
    )

    found = slices(events)
    assert found[1, 2, "version 1"][1] == 1_000_000
    assert found[1, 2, "transfer"][1] == 500_000
    assert found[1, 2, "commit"][1] == 250_000, "it goes on after the commit was recorded, and stays within its slice"
    assert found[1, 3, "evaluation of version 1"][1] == 2_000_000
    assert [(e["name"], e["args"]) for e in events if e["ph"] == "i"] == [("service_left", {"service_id": "r"})]


async def keep_run(data: Path) -> None:
    """Write what a gateway and a trainer leave of three steps."""
    data.mkdir()
    record = a_record("first", name="first", state=ExperimentState.COMPLETED, step=3, directory=str(data / "moved"))
    points = [
        PointRecord(name=f"time/{part}_seconds", step=step, version=step - 1, value=1.0, at=rfc3339(T + 10 * step))
        for step in (1, 2, 3)
        for part in ("wait", "compute", "publish", "checkpoint")
    ]
    publications = [
        PublicationRecord(
            experiment_id="first", version=v, step=v, epoch=1, phase="committed", service_id="trainer-1", manifest={},
            members=(), rendezvous=None, reason=None, announced_at=T + 10 * v, ended_at=T + 10 * v + 1,
        )
        for v in (1, 2)
    ]  # fmt: skip
    store = await SqlStore.open(f"sqlite:///{data / 'gateway.sqlite'}")
    events = AppendEvent("first", "checkpoint", T + 31, {"step": 3})
    await store.apply([PutRecord(record), *map(PutRecord, publications), PutMetrics("first", points), events])
    await store.close()
    (data / "experiments" / "first").mkdir(parents=True)
    for step in (1, 2, 3):
        issued_at = T + 10 * step - 8
        group = sampled(step, rewards=[0.0, 1.0])
        group = replace(group, task=replace(group.task, issued_at=issued_at))
        group = group.timed("generated_after_seconds", issued_at + 2).timed("graded_after_seconds", issued_at + 3)
        kept = [KeptGroup(group, SampleKind.TRAINED)]
        SampleFolder(data / "experiments" / "first", SamplesConfig()).write(
            SampleFile(step_name(step), kept, step, step - 1, {})
        )


def test_the_command_reads_a_run_that_was_moved_and_leaves_out_old_steps(tmp_path: Path) -> None:
    anyio.run(keep_run, tmp_path / "fleet")
    output = tmp_path / "out.json"

    async def run(*more: str) -> list[dict[str, Any]]:
        arguments = build_parser().parse_args(["timeline", str(tmp_path), "--output", str(output), *more])
        assert await timeline(arguments) == 0
        events: list[dict[str, Any]] = json.loads(output.read_text())["traceEvents"]
        return [each for each in events if each["ph"] != "M"]

    whole = anyio.run(run, "--steps", "0")
    newest = anyio.run(run, "--steps", "1", "--json")

    names = {each["name"] for each in whole}
    assert {"group 1", "group 2", "group 3", "step 1", "version 1", "version 2", "checkpoint"} <= names
    (sampled_at,) = [e["ts"] for e in whole if (e["name"], e["pid"], e["ph"]) == ("group 3", 3, "X")]
    (issued_at,) = [e["ts"] for e in whole if (e["name"], e["pid"], e["ph"]) == ("group 3", 1, "X")]
    assert sampled_at - issued_at == 3_000_000
    assert {each["name"] for each in newest if each["ph"] == "X"} == {
        "group 3", "step 3", "wait", "compute", "publish", "checkpoint",
    }  # fmt: skip
    assert list(tmp_path.glob("*.tmp")) == []


@pytest.mark.parametrize("table", ["publications", "events"])
def test_a_database_that_lacks_what_is_read_is_named(tmp_path: Path, table: str) -> None:
    anyio.run(keep_run, tmp_path / "fleet")
    with closing(sqlite3.connect(tmp_path / "fleet" / "gateway.sqlite")) as database:
        database.execute(f"DROP TABLE {table}")
    arguments = build_parser().parse_args(["timeline", str(tmp_path), "--output", str(tmp_path / "out.json")])

    with pytest.raises(Unavailable, match=f"gateway.sqlite cannot be read: no such table: {table}"):
        anyio.run(timeline, arguments)


def test_no_times_are_recorded_of_a_task_without_one() -> None:
    group = sampled(1, rewards=[0.0])

    assert group.timed("graded_after_seconds", T) is group
